"""Files, processes and text of the operating system: who owns what, whole writes, what may reach a terminal."""
