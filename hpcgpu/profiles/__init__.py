"""The site profiles that come with hpcgpu, and the draft of a new one."""
