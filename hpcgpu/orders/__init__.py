"""Commands of other programs: the running manager, the scheduler job, or this program carries them out."""
