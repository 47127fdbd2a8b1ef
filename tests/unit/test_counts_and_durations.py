"""Numbers with their nouns."""

from hpcgpu.display.counts_and_durations import counted


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(n, "worker") for n in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
    assert counted(1.5, "GPU hour") == "1.5 GPU hours"
    assert counted(2, "process", "processes") == "2 processes"
