"""The archives that jobs can unpack."""

from __future__ import annotations

#: Programs that decompress, by the end of the archive's name. Each reads stdin and writes stdout.
DECOMPRESSORS = {".tar.zst": "zstd", ".tar.gz": "gzip", ".tar": ""}
