"""Adds worker groups to a cluster, and deletes them: their options, their script, and what the user wants."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcgpu.errors import ClusterError, OptionError
from hpcgpu.manager.reconciler import Reconciler
from hpcgpu.options import values
from hpcgpu.options.shared_options_and_defaults import DEFAULT, Options, WorkerOptions
from hpcgpu.posix.full_disk import cannot_be_written
from hpcgpu.scaling.wanted_state import AddGroup, DeleteGroup, Sent, check_new
from hpcgpu.scripts import container, render
from hpcgpu.store import saved_options


class WorkerGroups:
    """The worker groups of one cluster.

    Parameters
    ----------
    reconciler : Reconciler
    options : Options
        Of the cluster.
    """

    def __init__(self, reconciler: Reconciler, options: Options) -> None:
        self._reconciler = reconciler
        self._registry, self._dispatcher = reconciler.state.registry, reconciler.state.dispatcher
        self._options = options

    def carry_out(self, command: Sent) -> None:
        """Carry out a command of another program; see `Reconciler.order`."""
        match command:
            case AddGroup(group=name):
                values.new_name("worker group", name)
                worker = saved_options.group_from_json(self._options.system, command.options)
                self.add(command, worker)
            case DeleteGroup():
                self.delete(command)
            case _:
                self._reconciler.order(command)

    def add(self, command: AddGroup, worker: WorkerOptions) -> None:
        """Add a group that has these options.

        The script is written here, in the thread of the event loop: of several programs that add a group of one name,
        only the first one writes.

        Raises
        ------
        OptionError
            A group of that name exists.
        ClusterError
            The cluster has failed or is closed, another program manages it, or the group cannot be saved.
        """
        name, directory = command.group, self._dispatcher.directory
        check_new(name, self._registry.groups)
        if not command.script:
            raise OptionError(f"worker group {name!r} has no job script: the program that adds it must send one")
        self._reconciler.state.check_manager()
        try:
            script = directory.write(render.script_name(self._options.system, "worker", name), command.script)
        except OSError as error:
            raise _not_added(name, directory.path, error) from error
        group = self._registry.add_group(name, worker, script)
        try:
            saved_options.write(directory, self._options, self._further)
            self._reconciler.order(command)
        except BaseException as error:
            self._registry.remove_group(group)
            with suppress(OSError):
                saved_options.write(directory, self._options, self._further)
            if isinstance(error, OSError):
                raise _not_added(name, directory.path, error) from error
            raise

    def delete(self, command: DeleteGroup) -> None:
        """Drain all jobs of a group, and forget the group. A full disk is only reported.

        Raises
        ------
        OptionError
            There is no such group, or it is the default group.
        ClusterError
            The cluster has failed or is closed, or another program manages it.
        """
        self._registry.group_named(command.group)
        if command.group == DEFAULT:
            raise OptionError("the default group cannot be deleted: scale(jobs=0) ends its jobs")
        self._reconciler.order(command)
        self._dispatcher.save_groups(self._options, self._further)

    @property
    def _further(self) -> dict[str, WorkerOptions]:
        return {name: group.options for name, group in self._registry.groups.items() if name != DEFAULT}


def script_of(name: str, worker: WorkerOptions, options: Options, directory: Path) -> str:
    """Return the text of the script of a new group. Blocks.

    The program that adds the group calls it, and not the manager, which may run on a compute node or in a container:
    templates, a packed environment and a prologue may not be there, and their owners could not be checked.

    Raises
    ------
    ClusterError
        The cluster's directory cannot be written.
    """
    try:
        container.provide(directory, worker)
    except OSError as error:
        raise _not_added(name, directory, error) from error
    return render.render(options.system, "worker", replace(options, worker=worker), directory, name)


def _not_added(name: str, directory: Path, error: OSError) -> ClusterError:
    return ClusterError(f"worker group {name!r} cannot be added, because {cannot_be_written(directory, error)}")
