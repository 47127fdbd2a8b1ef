"""What hpcgpu uses of other projects beyond their documented interfaces.

Each `Use` names one thing that upstream may change without notice: a function that hpcgpu replaces, a name with a
leading underscore, or a detail of a protocol. Its canary is a test that runs the real upstream code, and fails with a
sentence when upstream has changed. Public names are not listed: where one is gone, the import fails.

``tests/unit/test_upstream.py`` holds this table against the code. ``docs/upstream.rst`` shows it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["USES", "Kind", "Use"]


class Kind(enum.Enum):
    """How hpcgpu uses a thing of upstream."""

    REPLACED = "hpcgpu puts its own in this place"
    PRIVATE = "a private name, which hpcgpu calls, overrides or reads"
    PROTOCOL = "a detail that is not documented"


@dataclass(frozen=True)
class Use:
    """One thing of upstream that hpcgpu relies on.

    Attributes
    ----------
    name : str
        Module, class that defines it, name. What is inside a function follows it. hpcgpu's code has the last part.
    distribution : str
        Who has it.
    kind : Kind
    why : str
        What hpcgpu needs it for.
    used_in : tuple of str
        Modules or packages of hpcgpu.
    canary : str
        Name of the test in ``tests/canaries``.
    issues : tuple of str
        Upstream issues and pull requests that are about it, as ``owner/repository#number``; empty where none is known.
    """

    name: str
    distribution: str
    kind: Kind
    why: str
    used_in: tuple[str, ...]
    canary: str
    issues: tuple[str, ...] = ()


_GROUPS = ("dask/distributed#5577", "dask/distributed#4069", "dask/distributed#9102", "dask/distributed#9121")
_KILLED = ("dask/distributed#2694", "dask/distributed#8202")
_HTTP = ("dask/distributed#6407",)
_AMM = ("dask/distributed#5381",)
_OPENSSL = ("python/cpython#148594", "python/cpython#81891")


def _cluster(name: str, why: str, *issues: str, canary: str) -> Use:
    """Return what the cluster's class, which is a SpecCluster, relies on."""
    return Use(f"distributed.deploy.{name}", "distributed", Kind.PRIVATE, why, ("hpcgpu.cluster",), canary, issues)


def _scheduler(name: str, why: str, canary: str, *issues: str, kind: Kind = Kind.PROTOCOL) -> Use:
    """Return what the extension of the scheduler relies on."""
    return Use(f"distributed.{name}", "distributed", kind, why, ("hpcgpu.runtime.extension",), canary, issues)


def _server(name: str, why: str, kind: Kind = Kind.PRIVATE) -> Use:
    """Return what the first process of a job relies on when it starts the fork server."""
    canary = "test_python_starts_the_fork_server_by_the_function_that_hpcgpu_replaces"
    return Use(f"multiprocessing.{name}", "CPython", kind, why, ("hpcgpu.runtime.forkserver",), canary)


def _nanny(name: str, why: str, module: str) -> Use:
    """Return what a forked worker gets from its nanny."""
    canary = "test_a_nanny_sets_before_it_starts_a_worker_what_hpcgpu_gives_the_fork_server"
    return Use(f"distributed.nanny.Nanny.{name}", "distributed", Kind.PROTOCOL, why, (module,), canary)


def _client(name: str, why: str, kind: Kind = Kind.REPLACED) -> Use:
    """Return what tells a client why its scheduler is gone."""
    return Use(f"distributed.client.Client.{name}", "distributed", kind, why, ("hpcgpu.remote.lost",), _LOST)


def _signals(module: str, distribution: str) -> Use:
    """Return what a worker's program does when it gets a signal."""
    canary = f"test_{distribution.replace('-', '_')}_waits_for_signals_by_the_function_that_hpcgpu_replaces"
    why = "a SIGTERM may be a warning, after which the job goes on for a while"
    return Use(f"{module}.wait_for_signals", distribution, Kind.REPLACED, why, ("hpcgpu.runtime.warned",), canary)


def _request(name: str, why: str) -> Use:
    """Return what the dashboard's server relies on before a request is read."""
    return Use(f"tornado.{name}", "tornado", Kind.REPLACED, why, ("hpcgpu.runtime.dashboard",), _DASHBOARD)


_CALLS = "test_the_cluster_calls_what_hpcgpu_overrides"
_STREAM = "test_the_scheduler_reports_workers_by_the_stream_that_hpcgpu_reads"
_SILENT = "test_a_worker_whose_job_has_ended_is_removed_once_it_sends_no_heartbeats"
_MOVES = "test_stealing_moves_a_task_that_waits_for_resources_when_hpcgpu_asks_for_it"
_UNREADABLE = "test_a_graph_that_cannot_be_rebuilt_is_reported_by_the_function_that_hpcgpu_replaces"
_RESULTS = "test_results_and_broadcasts_go_through_the_handlers_that_hpcgpu_replaces"
_LOST = "test_a_client_whose_scheduler_closes_waits_until_hpcgpu_says_why"
_WORK = "test_calls_are_counted_and_keep_the_scheduler_by_what_hpcgpu_replaces"
_TLS = "test_both_ends_of_a_tls_connection_have_the_socket_of_hpcgpu"
_HANDSHAKE = "test_who_connects_and_says_nothing_is_dropped_by_the_method_that_hpcgpu_overrides"
_FEW = "test_a_server_takes_its_connections_from_the_sockets_that_hpcgpu_takes_them_from"
_UCX = "test_ucx_connections_are_authenticated_before_distributed_reads"
_DASHBOARD = "test_each_server_of_a_scheduler_starts_by_the_method_that_hpcgpu_replaces"

USES: tuple[Use, ...] = (
    # distributed: the cluster
    _cluster("cluster.Cluster._start", "starts the cluster by the manager", canary=_CALLS),
    _cluster("cluster.Cluster._close", "ends the cluster by the manager", canary=_CALLS),
    _cluster(
        "spec.SpecCluster._correct_state",
        "a job has several workers, which SpecCluster does not scale",
        *_GROUPS,
        canary=_CALLS,
    ),
    _cluster("cluster.Cluster._get_logs", "returns the logs of jobs, of the scheduler and of workers", canary=_CALLS),
    _cluster("cluster.Cluster.scheduler_info", "the list of workers, which hpcgpu gives it", canary=_CALLS),
    _cluster("cluster.Cluster._log", "keeps lines in the logs of the cluster", canary=_CALLS),
    _cluster("cluster.Cluster._loop_runner", "stops the event loop of a closed cluster", canary=_CALLS),
    _cluster("cluster.Cluster._adaptive", "read by the notebook's display and by close", canary=_CALLS),
    _cluster("cluster.Cluster._cluster_info", "says whether Cluster.__init__ has run", canary=_CALLS),
    Use(
        "distributed.scheduler.Scheduler.subscribe_worker_status",
        "distributed",
        Kind.PROTOCOL,
        "says when workers come and go",
        ("hpcgpu.cluster",),
        _STREAM,
    ),
    # distributed: the scheduler
    _scheduler(
        "scheduler.Scheduler.remove_worker",
        "lets a task survive four preempted jobs",
        "test_the_scheduler_removes_lost_workers_by_the_method_that_hpcgpu_replaces",
        *_KILLED,
        kind=Kind.REPLACED,
    ),
    _scheduler(
        "scheduler.TaskState.suspicious",
        "charges a task with a lost worker only if its job crashed",
        "test_a_lost_worker_can_be_charged_to_its_tasks_later",
        *_KILLED,
    ),
    _scheduler(
        "scheduler.Scheduler._reschedule",
        "moves tasks away from retiring workers",
        "test_a_task_that_has_not_begun_moves_to_another_worker",
        kind=Kind.PRIVATE,
    ),
    Use(
        "distributed.scheduler.SchedulerState._get_prefix_duration",
        "distributed",
        Kind.PRIVATE,
        "estimates the work that waits, as distributed's own adaptive scaling does",
        ("hpcgpu.runtime.extension", "hpcgpu.runtime.resources"),
        "test_the_scheduler_estimates_how_long_a_task_takes",
    ),
    Use(
        "distributed.stealing.WorkStealing.move_task_request",
        "distributed",
        Kind.PROTOCOL,
        "moves tasks that wait for resources: stealing moves none while a worker has as many threads as tasks",
        ("hpcgpu.runtime.resources",),
        _MOVES,
        ("dask/distributed#1851",),
    ),
    Use(
        "distributed.stealing.WorkStealing.in_flight",
        "distributed",
        Kind.PROTOCOL,
        "says which tasks move already",
        ("hpcgpu.runtime.resources",),
        _MOVES,
    ),
    _scheduler(
        "scheduler.Scheduler.stream_comms",
        "lets a retiring worker run tasks again",
        "test_a_worker_that_was_to_leave_can_be_told_to_stay",
        "dask/distributed#6223",
    ),
    _scheduler(
        "versions.error_message",
        "compares the versions of a joining worker with one worker for all that have the same, not with thousands",
        "test_the_scheduler_compares_versions_by_the_function_that_hpcgpu_replaces",
        kind=Kind.REPLACED,
    ),
    _scheduler(
        "scheduler.error_message",
        "explains why a graph with GPU objects cannot be rebuilt",
        _UNREADABLE,
        "dask/distributed#6924",
        kind=Kind.REPLACED,
    ),
    Use(
        "distributed.scheduler.Scheduler.update_graph.deserialization of the task graph",
        "distributed",
        Kind.PROTOCOL,
        "recognizes that error by its text",
        ("hpcgpu.runtime.hostcopy",),
        _UNREADABLE,
        ("dask/distributed#6924",),
    ),
    _scheduler(
        "scheduler.Scheduler.handlers.gather",
        "copies results in GPU memory to the host for clients that have no GPU",
        _RESULTS,
    ),
    _scheduler(
        "scheduler.Scheduler.handlers.broadcast",
        "copies results in GPU memory to the host for clients that have no GPU",
        _RESULTS,
    ),
    Use(
        "distributed.client.Client.dashboard_link",
        "distributed",
        Kind.REPLACED,
        "leads a client that knows only an address to the dashboard behind Jupyter's login",
        ("hpcgpu.remote.connection",),
        "test_a_client_shows_the_link_of_the_property_that_hpcgpu_replaces",
    ),
    _client("_reconnect", "asks why the scheduler is gone, before a client cancels what it waits for"),
    _client("_handle_report", "ends when the scheduler closes the connection of a client"),
    _client("_gather_remote", "asks why the scheduler is gone where a client fetches results from it"),
    _client("_gather_keys", "names a result that is fetched then", Kind.PRIVATE),
    Use(
        "distributed.scheduler.Scheduler.broadcast",
        "distributed",
        Kind.REPLACED,
        "counts the calls that run on workers",
        ("hpcgpu.runtime.calls",),
        _WORK,
    ),
    Use(
        "distributed.core.Server._ongoing_background_tasks",
        "distributed",
        Kind.PRIVATE,
        "counts a call that goes on after its answer",
        ("hpcgpu.runtime.calls",),
        _WORK,
    ),
    Use(
        "distributed._async_taskgroup.AsyncTaskGroup._ongoing_tasks",
        "distributed",
        Kind.PRIVATE,
        "counts a call that goes on after its answer",
        ("hpcgpu.runtime.calls",),
        _WORK,
    ),
    _scheduler(
        "scheduler.Scheduler.check_idle",
        "counts calls and GPUs that work against idle_timeout",
        _WORK,
        kind=Kind.REPLACED,
    ),
    _scheduler(
        "scheduler.Scheduler.check_worker_ttl",
        "keeps a worker whose event loop a call holds",
        _WORK,
        kind=Kind.REPLACED,
    ),
    Use(
        "distributed.scheduler.WorkerState.last_seen",
        "distributed",
        Kind.REPLACED,
        "removes silent workers whose job has ended, and keeps one whose event loop a call holds",
        ("hpcgpu.runtime.calls", "hpcgpu.runtime.extension"),
        _SILENT,
    ),
    _scheduler(
        "core.Server.periodic_callbacks.callback", "counts calls and GPUs that work against idle_timeout", _WORK
    ),
    Use(
        "distributed.comm.core.connect.handshake_overrides",
        "distributed",
        Kind.PROTOCOL,
        "informs the scheduler whether a client has a GPU",
        ("hpcgpu.fabric.security",),
        _RESULTS,
    ),
    _scheduler("comm.core.Comm.remote_info", "holds what a client reported about itself", _RESULTS),
    Use(
        "distributed.protocol.serialize.serialize.header.serializer",
        "distributed",
        Kind.PROTOCOL,
        "keeps host copies readable for clients without hpcgpu",
        ("hpcgpu.runtime.hostcopy",),
        "test_a_host_copy_is_read_by_distributed_alone",
    ),
    Use(
        "distributed.active_memory_manager.ActiveMemoryManagerExtension._find_recipient",
        "distributed",
        Kind.REPLACED,
        "data of a GPU worker must not go to workers without a GPU",
        ("hpcgpu.runtime.recipients",),
        "test_data_of_a_retiring_worker_goes_where_the_method_that_hpcgpu_replaces_says",
        _AMM,
    ),
    Use(
        "distributed.worker.Worker.startup_information",
        "distributed",
        Kind.PROTOCOL,
        "informs the scheduler of the node, the GPUs and the software of a worker",
        ("hpcgpu.runtime.worker",),
        "test_data_of_a_retiring_worker_goes_where_the_method_that_hpcgpu_replaces_says",
    ),
    Use(
        "distributed.node.ServerNode.start_http_server",
        "distributed",
        Kind.REPLACED,
        "the dashboard must ask for the token before it answers anybody",
        ("hpcgpu.runtime.dashboard",),
        _DASHBOARD,
        _HTTP,
    ),
    Use(
        "distributed.dashboard.components.scheduler.HTMLTemplateFormatter",
        "distributed",
        Kind.REPLACED,
        "the table of exceptions must show keys, exceptions and tracebacks as text",
        ("hpcgpu.runtime.dashboard",),
        "test_the_table_of_exceptions_makes_its_cells_by_the_class_that_hpcgpu_replaces",
    ),
    Use(
        "tornado.httpserver.HTTPServer.request_callback",
        "tornado",
        Kind.REPLACED,
        "sees each request before a handler is chosen",
        ("hpcgpu.runtime.dashboard",),
        _DASHBOARD,
        _HTTP,
    ),
    _request("httpserver.HTTPServer.handle_stream", "limits the connections that nobody has identified yet"),
    _request(
        "http1connection.HTTP1ConnectionParameters.header_timeout",
        "limits the time of a request that nobody has identified yet",
    ),
    _request("http1connection.HTTP1ConnectionParameters.max_header_size", "limits the size of such a request"),
    # distributed: how workers start
    Use(
        "distributed.utils._forkserver_preload_set",
        "distributed",
        Kind.PRIVATE,
        "keeps the list of what the fork server imports: distributed sets its own, and imports all of it in the nanny",
        ("hpcgpu.runtime.forkserver",),
        "test_distributed_leaves_what_the_fork_server_imports_alone",
    ),
    _nanny("env", "a forked worker gets the environment of its nanny by it", "hpcgpu.runtime.nanny"),
    _nanny("pre_spawn_env", "is in the environment that the fork server starts with", "hpcgpu.runtime.forkserver"),
    Use(
        "multiprocessing.process.BaseProcess._config",
        "CPython",
        Kind.PRIVATE,
        "puts the socket of the fork server into a directory that hpcgpu removes",
        ("hpcgpu.runtime.forkserver", "hpcgpu.runtime.nanny", "hpcgpu.runtime.worker"),
        "test_multiprocessing_puts_its_sockets_where_hpcgpu_says",
    ),
    _server("util.spawnv_passfds", "makes the fork server a fork of the first process of a job", Kind.REPLACED),
    _server("forkserver._forkserver", "a fork of the first process of a job begins with a fresh one"),
    _server("resource_tracker._resource_tracker", "a fork of the first process of a job begins without one"),
    _server("forkserver.ForkServer._forkserver_pid", "ends the fork server if its workers cannot be forks"),
    Use(
        "distributed.nanny.Nanny.instantiate",
        "distributed",
        Kind.REPLACED,
        "each start of a forked worker, a restart too, looks first at what has changed on the node and in the nanny",
        ("hpcgpu.runtime.nanny",),
        "test_a_nanny_starts_and_restarts_its_worker_by_the_method_that_hpcgpu_replaces",
    ),
    Use(
        "atexit._run_exitfuncs",
        "CPython",
        Kind.PRIVATE,
        "a forked worker runs at its end what a spawned one runs",
        ("hpcgpu.runtime.warm",),
        "test_a_forked_process_runs_once_what_was_registered_for_its_end",
        ("python/cpython#83856",),
    ),
    # distributed: connections
    Use(
        "distributed.comm.registry.backends",
        "distributed",
        Kind.REPLACED,
        "registers TLS with a handshake timeout, UCX and TCP with authentication, and no TCP without it",
        ("hpcgpu.fabric.tls", "hpcgpu.fabric.authentication", "hpcgpu.fabric.authenticated_tcp"),
        _TLS,
    ),
    Use(
        "distributed.comm.tcp.TLSBackend._connector_class",
        "distributed",
        Kind.PRIVATE,
        "makes connections",
        ("hpcgpu.fabric.tls", "hpcgpu.fabric.authenticated_tcp"),
        _TLS,
    ),
    Use(
        "distributed.comm.tcp.TLSBackend._listener_class",
        "distributed",
        Kind.PRIVATE,
        "makes listeners",
        ("hpcgpu.fabric.tls", "hpcgpu.fabric.authenticated_tcp"),
        _TLS,
    ),
    Use(
        "distributed.comm.tcp.TLSConnector._get_connect_args",
        "distributed",
        Kind.PRIVATE,
        "gives connections the socket that clears OpenSSL's errors",
        ("hpcgpu.fabric.tls",),
        _TLS,
        _OPENSSL,
    ),
    Use(
        "distributed.comm.tcp.TLSListener._get_server_args",
        "distributed",
        Kind.PRIVATE,
        "gives listeners the socket that clears OpenSSL's errors",
        ("hpcgpu.fabric.tls",),
        _TLS,
        _OPENSSL,
    ),
    Use(
        "distributed.comm.tcp.TLS._read_extra",
        "distributed",
        Kind.PRIVATE,
        "notes the certificates of a connection, for the message when it breaks",
        ("hpcgpu.fabric.tls",),
        _TLS,
    ),
    Use(
        "distributed.comm.tcp.TLSListener._prepare_stream",
        "distributed",
        Kind.PRIVATE,
        "limits the time of a handshake",
        ("hpcgpu.fabric.tls",),
        _HANDSHAKE,
    ),
    Use(
        "tornado.tcpserver.TCPServer._sockets",
        "tornado",
        Kind.PRIVATE,
        "the sockets that a server listens on, from which hpcgpu takes few connections in one turn",
        ("hpcgpu.fabric.strangers",),
        _FEW,
    ),
    Use(
        "tornado.tcpserver.TCPServer._handle_connection",
        "tornado",
        Kind.PRIVATE,
        "gets each connection that hpcgpu lets in",
        ("hpcgpu.fabric.strangers",),
        _FEW,
    ),
    Use(
        "distributed.comm.tcp.RequireEncryptionMixin._check_encryption",
        "distributed",
        Kind.PRIVATE,
        "refuses plain TCP to a process that has the key of a cluster",
        ("hpcgpu.fabric.authenticated_tcp",),
        "test_each_tcp_connection_and_listener_is_checked_before_it_is_made",
    ),
    Use(
        "distributed.comm.tcp.TCPListener._prepare_stream",
        "distributed",
        Kind.PRIVATE,
        "authenticates a TCP connection before a message is read",
        ("hpcgpu.fabric.authenticated_tcp",),
        "test_a_tcp_listener_reads_nothing_before_the_method_that_hpcgpu_overrides",
    ),
    Use(
        "ssl.SSLObject.do_handshake",
        "CPython",
        Kind.PROTOCOL,
        "a handshake that waits clears OpenSSL's error queue, which CPython does not",
        ("hpcgpu.fabric.tls",),
        "test_cpython_leaves_errors_of_other_connections_and_a_handshake_clears_them",
        _OPENSSL,
    ),
    Use(
        "distributed.core.ConnectionPool.reuse",
        "distributed",
        Kind.PROTOCOL,
        "says what carries the connections that data transfers use",
        ("hpcgpu.fabric.links",),
        "test_a_worker_can_be_asked_for_its_connections",
    ),
    Use(
        "distributed.core.Server.handlers",
        "distributed",
        Kind.PROTOCOL,
        "lets a worker take the data of a measurement",
        ("hpcgpu.fabric.links",),
        "test_a_worker_can_be_asked_for_its_connections",
    ),
    # UCX
    Use(
        "distributed.comm.core.BaseListener.on_connection",
        "distributed",
        Kind.PROTOCOL,
        "authenticates who connects before distributed reads a frame",
        ("hpcgpu.fabric.authentication",),
        _UCX,
    ),
    Use(
        "distributed_ucxx.ucxx.UCXXListener.connection_args",
        "distributed-ucxx",
        Kind.PROTOCOL,
        "holds the key of a listener",
        ("hpcgpu.fabric.authentication",),
        _UCX,
    ),
    Use(
        "distributed_ucxx.ucxx.UCXX.ep",
        "distributed-ucxx",
        Kind.PROTOCOL,
        "sends the messages of the authentication",
        ("hpcgpu.fabric.authentication", "hpcgpu.fabric.links"),
        _UCX,
    ),
    Use(
        "ucxx._lib_async.endpoint.Endpoint._ep",
        "ucxx",
        Kind.PRIVATE,
        "its handle lets UCX name the peer and the transports of a connection",
        ("hpcgpu.fabric.endpoints",),
        "test_ucx_names_the_peer_and_the_transports_of_a_connection",
    ),
    Use(
        "libucp.ucp_ep_query",
        "ucxx",
        Kind.PROTOCOL,
        "names the peer and the transports of a connection: ucxx has no call for that",
        ("hpcgpu.fabric.endpoints",),
        "test_ucx_names_the_peer_and_the_transports_of_a_connection",
    ),
    Use(
        "ucxx.get_active_transports",
        "ucxx",
        Kind.PROTOCOL,
        "says what UCX can use, from a separate process",
        ("hpcgpu.fabric.choice",),
        "test_ucx_names_the_peer_and_the_transports_of_a_connection",
    ),
    _signals("distributed.cli.dask_worker", "distributed"),
    # dask-cuda
    _signals("dask_cuda.cli", "dask-cuda"),
    Use(
        "dask_cuda.cuda_worker.nvml_device_index",
        "dask-cuda",
        Kind.REPLACED,
        "a worker must have the CPU affinity and memory limit of its own GPU",
        ("hpcgpu.runtime.devices",),
        "test_dask_cuda_takes_the_wrong_gpu_by_the_function_that_hpcgpu_replaces",
        ("rapidsai/dask-cuda#671",),
    ),
    Use(
        "dask_cuda.utils.get_ucx_config",
        "dask-cuda",
        Kind.PROTOCOL,
        "the scheduler must have the UCX settings that dask-cuda makes of its flags for workers",
        ("hpcgpu.fabric.settings",),
        "test_the_scheduler_gets_the_ucx_settings_that_dask_cuda_gives_workers",
    ),
    Use(
        "dask_cuda.cuda_worker.CUDAWorker.__init__.name",
        "dask-cuda",
        Kind.PROTOCOL,
        "the suffix of a worker's name identifies its job",
        ("hpcgpu.scaling.units",),
        "test_dask_cuda_names_workers_by_job_and_gpu",
    ),
)
