"""Text of others, made safe to show.

What queues, logs and other users' files contain is data, never a command to a terminal.
"""

from __future__ import annotations


def printable(text: str, limit: int | None = 2000, *, lines: bool = False) -> str:
    r"""Return a text with characters that could deceive a terminal or a reader escaped, as ``\x1b`` or ``\u202e``.

    These are control characters, escape sequences with them, marks that change the direction of writing, and all other
    characters that `str.isprintable` rejects.

    Parameters
    ----------
    text : str
    limit : int or None, default 2000
        Characters of the result at most; the middle of a longer text is left out, and the result says so.
    lines : bool, default False
        Keep line feeds and tabs.
    """
    if limit is None or len(text) <= limit:
        shown = _escaped(text, lines)
        if limit is None or len(shown) <= limit:
            return shown
    half = limit // 2 - 20  # the note between both halves takes less than 40
    return (
        f"{_escaped(text[:half], lines)[:half]} … ({len(text) - 2 * half} characters left out) … "
        f"{_escaped(text[-half:], lines)[-half:]}"
    )


def _escaped(text: str, lines: bool) -> str:
    if lines:
        text = text.replace("\r\n", "\n")
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in text)
