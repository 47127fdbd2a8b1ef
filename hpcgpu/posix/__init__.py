"""Files, processes and text of the operating system: ownership, whole writes, text that is safe on a terminal."""
