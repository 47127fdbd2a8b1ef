"""distributed imports it before a table travels. Tables of the stand-in are pickled."""
