"""What hpcgpu sets in the environment of one process, and jobs do not inherit."""

from __future__ import annotations

from hpcgpu.posix.variables_of_this_process import set_missing, without


def test_a_process_that_starts_jobs_on_other_nodes_passes_on_only_what_the_user_has_set() -> None:
    users = {"GLOO_SOCKET_IFNAME": "hsn", "A": "1"}
    environ = dict(users)
    set_missing(environ, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"})
    set_missing(environ, {"CUDF_SPILL": "on"})
    assert environ["NCCL_SOCKET_IFNAME"] == "=eth0" and environ["CUDF_SPILL"] == "on"
    assert environ["GLOO_SOCKET_IFNAME"] == "hsn"
    assert without(environ) == users == without(users)
