"""Where the scheduler of a cluster is reached, ``contact.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hpcgpu.posix import json_records
from hpcgpu.posix.printable import printable
from hpcgpu.store.cluster_json import Identity


@dataclass(frozen=True, kw_only=True)
class Contact:
    """Where a cluster's scheduler is reached; ``contact.json``.

    Attributes
    ----------
    token : str
        Ties the contact to the cluster; no secret.
    job_id : str
        The scheduler job, empty when the scheduler runs in the client's process.
    workers, client : str
        Addresses for workers and for clients, as Dask writes them.
    dashboard : str
        Port and host of the dashboard, as ``host:port``.
    fabric : str
        Why workers talk over this protocol.
    network, interface : str
        The network for workers on the scheduler's node, ``"infiniband"``, ``"slingshot"`` or nothing, and its
        interface; see `hpcgpu.fabric.protocol_and_interface.TransportChoice`.
    """

    token: str
    job_id: str
    workers: str
    client: str
    dashboard: str = ""
    fabric: str = ""
    network: str = ""
    interface: str = ""


class Contacts(Identity):
    """The contact of the cluster of one directory."""

    def publish(self, contact: Contact) -> None:
        """Write ``contact.json``."""
        self.write("contact.json", json.dumps(asdict(contact), indent=1))

    def contact(self) -> Contact | None:
        """Return the contact of this cluster, or None while there is none."""
        try:
            return self.certain_contact()
        except (OSError, ValueError):  # damaged, or a stale handle of NFS
            return None

    def certain_contact(self) -> Contact | None:
        """Return the contact of this cluster, or None if there certainly is none.

        Raises
        ------
        OSError, ValueError
            It cannot be read now.
        """
        self.refresh()
        try:
            contact = json_records.read(self.path / "contact.json", Contact)
        except FileNotFoundError:
            return None
        contact = Contact(**{field: printable(value) for field, value in asdict(contact).items()})
        return contact if contact.token == self.token() else None

    def withdraw(self) -> None:
        """Remove the contact, in both its forms."""
        for name in ("contact.json", "scheduler.json"):
            (self.path / name).unlink(missing_ok=True)
