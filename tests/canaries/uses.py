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
        Module, class that defines it, name. What is inside a function follows the name of the function. The last part
        occurs in hpcgpu's code.
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


_KILLED = ("dask/distributed#2694", "dask/distributed#8202")
_HTTP = ("dask/distributed#6407",)
_AMM = ("dask/distributed#5381",)
_LOSES = ("dask/distributed#3149", "dask/distributed#1110")
_WHY = ("dask/distributed#8830", "dask/distributed#8690")
_AGAIN = ("dask/distributed#436", "dask/distributed#5667")
_OPENSSL = ("python/cpython#148594", "python/cpython#81891")


def _scheduler(name: str, why: str, canary: str, *issues: str, kind: Kind = Kind.PROTOCOL) -> Use:
    """Return what the extension of the scheduler relies on."""
    return Use(
        f"distributed.{name}", "distributed", kind, why, ("hpcgpu.dask_scheduler.scheduler_extension",), canary, issues
    )


def _nanny(name: str, why: str, module: str) -> Use:
    """Return what a forked worker gets from its nanny."""
    canary = "test_a_nanny_sets_before_it_starts_a_worker_what_hpcgpu_gives_the_fork_server"
    return Use(f"distributed.nanny.Nanny.{name}", "distributed", Kind.PROTOCOL, why, (module,), canary)


def _client(name: str, why: str, kind: Kind = Kind.REPLACED) -> Use:
    """Return what reports to a client why its scheduler is gone."""
    return Use(
        f"distributed.client.Client.{name}", "distributed", kind, why, ("hpcgpu.client.lost_scheduler",), _LOST, _WHY
    )


def _held(name: str, why: str, kind: Kind = Kind.REPLACED, *modules: str) -> Use:
    """Return what submits the futures of a client to another scheduler."""
    canary = "test_what_a_client_holds_is_submitted_again_to_another_scheduler"
    modules = modules or ("futures_to_replay",)
    return Use(
        name, name.partition(".")[0], kind, why, tuple(f"hpcgpu.client.{one}" for one in modules), canary, _AGAIN
    )


_CHARGED = "test_a_lost_worker_is_charged_to_its_tasks_only_when_hpcgpu_reports_it"
_MOVES = "test_stealing_moves_a_task_that_waits_for_resources_when_hpcgpu_asks_for_it"
_PAUSED = "test_a_task_runs_on_valid_workers_alone_and_waits_while_there_are_none"
_UNREADABLE = "test_a_graph_that_cannot_be_rebuilt_is_reported_by_the_function_that_hpcgpu_replaces"
_RESULTS = "test_results_and_broadcasts_go_through_the_handlers_that_hpcgpu_replaces"
_LOST = "test_a_client_whose_scheduler_closes_waits_until_hpcgpu_reports_why"
_WORK = "test_calls_are_counted_by_what_hpcgpu_replaces"
_TLS = "test_both_ends_of_a_tls_connection_have_the_socket_of_hpcgpu"
_UCX = "test_ucx_connections_are_authenticated_before_distributed_reads"
_DASHBOARD = "test_scheduler_and_worker_serve_their_dashboards_by_the_class_that_hpcgpu_replaces"

USES: tuple[Use, ...] = (
    # distributed: the scheduler
    _scheduler(
        "scheduler.Scheduler.remove_worker.processing-tasks",
        "the event of a removed worker says which tasks and results it had, and whether its end was expected",
        _CHARGED,
        *_KILLED,
    ),
    *[
        Use(
            name,
            "distributed",
            Kind.PROTOCOL,
            "reports results that are lost for good to those who wait for them",
            ("hpcgpu.dask_scheduler.lost_results",),
            "test_results_that_are_lost_are_reported_by_what_hpcgpu_sets_and_sends",
            _LOSES,
        )
        for name in (
            "distributed.scheduler.TaskState.exception",
            "distributed.scheduler.TaskState.exception_blame",
            "distributed.client.Client._handle_report.cancelled-keys",
        )
    ],
    Use(
        "distributed.scheduler.SchedulerState.valid_workers",
        "distributed",
        Kind.REPLACED,
        "a worker saves the results that it has, and one without a GPU saves no result on a GPU; tasks fill few jobs",
        ("hpcgpu.dask_scheduler.data_recipients", "hpcgpu.dask_scheduler.place_in_few_jobs"),
        _PAUSED,
    ),
    Use(
        "distributed.stealing.WorkStealing.move_task_request",
        "distributed",
        Kind.PROTOCOL,
        "moves tasks that wait for resources: stealing moves none while a worker has as many threads as tasks",
        ("hpcgpu.dask_scheduler.tasks_waiting_for_resources",),
        _MOVES,
        ("dask/distributed#1851",),
    ),
    _scheduler(
        "scheduler.error_message",
        "explains why a graph with GPU objects cannot be rebuilt",
        _UNREADABLE,
        "dask/distributed#6924",
        kind=Kind.REPLACED,
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
        ("hpcgpu.client.connect",),
        "test_a_client_shows_the_link_of_the_property_that_hpcgpu_replaces",
        ("dask/distributed#6734",),
    ),
    _client("_reconnect", "asks why the scheduler is gone, before a client cancels what it waits for"),
    Use(
        "distributed.client.Client.scheduler",
        "distributed",
        Kind.REPLACED,
        "leads a client to the next scheduler of its cluster",
        ("hpcgpu.client.lost_scheduler",),
        "test_a_client_goes_on_with_another_scheduler",
        _AGAIN,
    ),
    _held(
        "distributed.client.Client._send_to_scheduler", "keeps the graphs that a client submits, until it releases them"
    ),
    _held("distributed.client.Client._send_to_scheduler_safe", "sends new graphs after those that are submitted again"),
    _held("distributed.client.Client.submit", "tasks that may not run again are not kept"),
    _held("distributed.client.Client.map", "tasks that may not run again are not kept"),
    _held("distributed.client.FutureState.reset", "a future waits for the next scheduler", Kind.PROTOCOL),
    _held(
        "distributed.client.Client._ensure_connected",
        "connects a client to the next scheduler, and its futures stay",
        Kind.PRIVATE,
        "lost_scheduler",
    ),
    _held(
        "distributed.client.Client._graph_to_futures.expr_ser",
        "the graph in the message to the scheduler, whose other fields stay as they are",
        Kind.PROTOCOL,
        "futures_to_replay",
        "replayed_graphs",
    ),
    _held("distributed.scheduler._materialize_graph", "the tasks of a graph", Kind.PRIVATE, "replayed_graphs"),
    _client("_handle_report", "ends when the scheduler closes the connection of a client"),
    _client("_gather_remote", "asks why the scheduler is gone where a client fetches results from it"),
    *[
        Use(
            f"distributed.worker.Worker.__init__.handlers.{operation}",
            "distributed",
            Kind.REPLACED,
            "counts the calls that a worker runs",
            ("hpcgpu.dask_worker.count_calls",),
            _WORK,
        )
        for operation in ("run", "actor_execute")
    ],
    Use(
        "distributed.worker.Worker.plugin_add",
        "distributed",
        Kind.REPLACED,
        "a worker that starts without a package that a program uploaded ends, and takes no tasks",
        ("hpcgpu.dask_worker.uploaded_package",),
        "test_a_worker_that_starts_adds_its_plugins_by_the_method_that_hpcgpu_replaces",
        ("dask/distributed#6906", "dask/distributed#8496"),
    ),
    Use(
        "distributed.worker.Worker.close",
        "distributed",
        Kind.REPLACED,
        "a worker whose connection breaks, which distributed tells by its reason, starts again in its job",
        ("hpcgpu.dask_worker.start_again",),
        "test_a_worker_that_loses_the_scheduler_closes_by_the_method_that_hpcgpu_replaces_and_reports_why",
        ("dask/distributed#2311", "dask/distributed#4079"),
    ),
    Use(
        "distributed.nanny.Nanny.kill",
        "distributed",
        Kind.REPLACED,
        "a nanny whose worker starts again and finds no scheduler within death_timeout ends, and obeys SIGTERM",
        ("hpcgpu.dask_worker.start_again",),
        "test_a_nanny_ends_whose_worker_starts_again_and_finds_no_scheduler",
        ("dask/distributed#7323",),
    ),
    Use(
        "distributed.nanny.WorkerProcess.kill.TimeoutError",
        "distributed",
        Kind.PROTOCOL,
        "a restart waits for a worker that ends later than a second after SIGKILL",
        ("hpcgpu.dask_worker.start_again",),
        "test_a_restart_waits_for_a_worker_that_ends_later_than_a_second_after_sigkill",
        ("dask/distributed#6902",),
    ),
    Use(
        "distributed.worker.Worker.metrics",
        "distributed",
        Kind.PROTOCOL,
        "informs the scheduler of the calls, the GPU and the transfers of a worker, with each heartbeat",
        ("hpcgpu.dask_scheduler.running_calls", "hpcgpu.dask_worker.count_calls", "hpcgpu.dask_worker.worker_preload"),
        _WORK,
    ),
    _scheduler("comm.core.Comm.remote_info", "holds what a client reported about itself", _RESULTS),
    Use(
        "distributed.protocol.serialize.serialize.header.serializer",
        "distributed",
        Kind.PROTOCOL,
        "keeps host copies readable for clients without hpcgpu",
        ("hpcgpu.runtime.results_in_host_memory",),
        "test_a_host_copy_is_read_by_distributed_alone",
    ),
    Use(
        "distributed.active_memory_manager.ActiveMemoryManagerExtension._find_recipient",
        "distributed",
        Kind.REPLACED,
        "data of a GPU worker must not go to workers without a GPU",
        ("hpcgpu.dask_scheduler.data_recipients",),
        "test_data_of_a_retiring_worker_goes_where_the_method_that_hpcgpu_replaces_chooses",
        _AMM,
    ),
    Use(
        "distributed.worker.Worker.startup_information",
        "distributed",
        Kind.PROTOCOL,
        "informs the scheduler of the node, the GPUs and the software of a worker",
        ("hpcgpu.dask_worker.worker_preload",),
        "test_data_of_a_retiring_worker_goes_where_the_method_that_hpcgpu_replaces_chooses",
    ),
    Use(
        "distributed.dashboard.components.scheduler.HTMLTemplateFormatter",
        "distributed",
        Kind.REPLACED,
        "the table of exceptions must show keys, exceptions and tracebacks as text",
        ("hpcgpu.runtime.dashboard_access",),
        "test_the_table_of_exceptions_makes_its_cells_by_the_class_that_hpcgpu_replaces",
    ),
    Use(
        "distributed.node.HTTPServer",
        "distributed",
        Kind.REPLACED,
        "the dashboard must ask for the token before it answers anybody",
        ("hpcgpu.runtime.dashboard_access",),
        _DASHBOARD,
        _HTTP,
    ),
    # distributed: how workers start
    Use(
        "distributed.utils._forkserver_preload_set",
        "distributed",
        Kind.PRIVATE,
        "keeps the list of what the fork server imports: distributed sets its own, and imports all of it in the nanny",
        ("hpcgpu.runtime.forkserver",),
        "test_distributed_leaves_what_the_fork_server_imports_alone",
    ),
    _nanny("env", "a forked worker gets the environment of its nanny by it", "hpcgpu.dask_worker.nanny_preload"),
    Use(
        "multiprocessing.process.BaseProcess._config",
        "CPython",
        Kind.PRIVATE,
        "puts the socket of the fork server into a directory that hpcgpu removes",
        ("hpcgpu.runtime.forkserver", "hpcgpu.dask_worker.nanny_preload", "hpcgpu.dask_worker.worker_preload"),
        "test_multiprocessing_puts_its_sockets_where_hpcgpu_sets_them",
    ),
    Use(
        "multiprocessing.util.spawnv_passfds",
        "CPython",
        Kind.REPLACED,
        "makes the fork server a fork of the first process of a job",
        ("hpcgpu.runtime.forkserver",),
        "test_python_starts_the_fork_server_by_the_function_that_hpcgpu_replaces",
    ),
    Use(
        "distributed.nanny.Nanny.instantiate",
        "distributed",
        Kind.REPLACED,
        "each start of a forked worker, a restart too, looks first at what has changed on the node and in the nanny",
        ("hpcgpu.dask_worker.nanny_preload",),
        "test_a_nanny_starts_and_restarts_its_worker_by_the_method_that_hpcgpu_replaces",
    ),
    Use(
        "atexit._run_exitfuncs",
        "CPython",
        Kind.PRIVATE,
        "a forked worker runs at its end what a spawned one runs",
        ("hpcgpu.runtime.forkserver_imports",),
        "test_a_forked_process_runs_once_what_was_registered_for_its_end",
        ("python/cpython#83856",),
    ),
    # distributed: connections
    Use(
        "distributed.comm.registry.backends",
        "distributed",
        Kind.REPLACED,
        "registers TLS with a handshake timeout, UCX and TCP with authentication, and no TCP without it",
        ("hpcgpu.fabric.tls_connections", "hpcgpu.fabric.ucx_authentication", "hpcgpu.fabric.authenticated_tcp"),
        _TLS,
    ),
    Use(
        "ssl.SSLObject.do_handshake",
        "CPython",
        Kind.PROTOCOL,
        "a handshake that waits clears OpenSSL's error queue, which CPython does not",
        ("hpcgpu.fabric.tls_connections",),
        "test_cpython_leaves_errors_of_other_connections_and_a_handshake_clears_them",
        _OPENSSL,
    ),
    # UCX
    Use(
        "distributed.comm.core.BaseListener.on_connection",
        "distributed",
        Kind.PROTOCOL,
        "authenticates who connects before distributed reads a frame",
        ("hpcgpu.fabric.ucx_authentication", "hpcgpu.fabric.authenticating_listener"),
        _UCX,
    ),
    Use(
        "distributed_ucxx.ucxx.UCXX.ep",
        "distributed-ucxx",
        Kind.PROTOCOL,
        "sends the messages of the authentication",
        ("hpcgpu.fabric.ucx_authentication", "hpcgpu.fabric.measure_links"),
        _UCX,
    ),
    Use(
        "ucxx._lib_async.listener.exchange_peer_info",
        "ucxx",
        Kind.REPLACED,
        "keeps the buffer of a connection that gives up until UCX no longer writes to it, and limits what is logged",
        ("hpcgpu.fabric.ucx_memory",),
        "test_ucx_connections_exchange_tags_by_the_function_that_hpcgpu_replaces",
        ("rapidsai/ucxx#98",),
    ),
    Use(
        "distributed._signals.wait_for_signals",
        "distributed",
        Kind.REPLACED,
        "a SIGTERM may be a warning, after which the job goes on for a while, and one that comes while the workers of "
        "a job end with their scheduler ends the job",
        ("hpcgpu.runtime.dask_signals",),
        "test_dask_waits_for_signals_by_the_function_that_hpcgpu_replaces",
        ("dask/distributed#699",),
    ),
    # dask-cuda
    Use(
        "dask_cuda.cuda_worker.nvml_device_index",
        "dask-cuda",
        Kind.REPLACED,
        "a worker must have the CPU affinity and memory limit of its own GPU",
        ("hpcgpu.runtime.cpu_affinity",),
        "test_dask_cuda_takes_the_wrong_gpu_by_the_function_that_hpcgpu_replaces",
        ("rapidsai/dask-cuda#671",),
    ),
    Use(
        "dask_cuda.cuda_worker.CUDAWorker.__init__.name",
        "dask-cuda",
        Kind.PROTOCOL,
        "the suffix of a worker's name identifies its job",
        ("hpcgpu.scaling.worker_names",),
        "test_dask_cuda_names_workers_by_job_and_gpu",
    ),
)
