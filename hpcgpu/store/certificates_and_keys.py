"""The credentials of one cluster, which its scheduler, workers and client share.

These are a TLS key with a self-signed certificate, and a key for UCX.

distributed's own ``Security.temporary`` makes certificates that are valid from now on. A node whose clock is behind the
login node's clock would refuse them. The certificates of this module are valid from a day earlier.
"""

from __future__ import annotations

import datetime
import secrets
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgpu.errors import Damaged
from hpcgpu.fabric import certificate_errors, ucx_authentication
from hpcgpu.posix import checked_files
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from distributed.security import Security


_CLOCK_SKEW = datetime.timedelta(days=1)
#: How long the scheduler job may wait in the queue, and how long a cluster may live that no walltime ends. Only its own
#: scheduler, workers and clients trust the certificate, so a long validity helps nobody after the end of the cluster.
_QUEUE, _UNLIMITED = datetime.timedelta(days=90), datetime.timedelta(days=3650)


def create(directory: ClusterDirectory, walltime: float | None = None, *, waits: bool = True) -> None:
    """Make ``tls/ucx.key`` and, if the cluster uses TLS, ``tls/key.pem`` and ``tls/cert.pem``, with mode 0600.

    Parameters
    ----------
    directory : ClusterDirectory
    walltime : float, optional
        Walltime of the scheduler job in seconds: the certificate is valid for 90 days in the queue and for this time.
        Default: ten years, also for a cluster whose scheduler job is followed by others.
    waits : bool, default True
        Whether the scheduler job must still wait. If it runs already, a day replaces the 90 days, for clocks that
        differ.
    """
    directory.tls.mkdir(mode=0o700)
    directory.write("tls/ucx.key", secrets.token_hex(32))
    if directory.authenticated:
        return
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hpcgpu")])
    now = datetime.datetime.now(datetime.UTC)
    before = _QUEUE if waits else _CLOCK_SKEW
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + (before + datetime.timedelta(seconds=walltime) if walltime else _UNLIMITED))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    directory.write("tls/key.pem", pem.decode())
    directory.write("tls/cert.pem", certificate.public_bytes(serialization.Encoding.PEM).decode())


def problem(directory: ClusterDirectory, *, now: float) -> str:
    """Return why the certificate cannot be used now, by this machine's clock.

    Empty if it can be used, or if there is none. Each job does this first, so Python's own module reads the
    certificate: to import `cryptography` takes a hundred steps on the shared filesystem.

    Raises
    ------
    Damaged
        The file is no certificate.
    """
    if not directory.tls.is_dir() or directory.authenticated:
        return ""
    context, path = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), directory.tls / "cert.pem"
    text = checked_files.read(path).decode("ascii", errors="backslashreplace")
    try:
        context.load_verify_locations(cadata=text)
        (certificate,) = context.get_ca_certs()
    except (ssl.SSLError, ValueError) as error:
        raise Damaged(f"{path} is damaged: it is not the certificate of a cluster") from error
    begin, end = (float(ssl.cert_time_to_seconds(str(certificate[name]))) for name in ("notBefore", "notAfter"))
    return certificate_errors.problem(begin, end, now=now, host=socket.gethostname(), what=certificate_name(directory))


def certificate_name(directory: ClusterDirectory) -> str:
    """Return how messages name the certificate."""
    return f"the certificate of cluster {directory.path.name}"


def _files(tls: Path) -> dict[str, str]:
    files = {"tls_ca_file": str(tls / "cert.pem")}
    for role in ("scheduler", "worker", "client"):
        files[f"tls_{role}_cert"] = str(tls / "cert.pem")
        files[f"tls_{role}_key"] = str(tls / "key.pem")
    return files


def security(directory: ClusterDirectory) -> Security:
    """Return distributed's Security of a cluster: with these credentials, or an empty one if TLS is off."""
    from distributed.security import Security

    from hpcgpu.fabric.security import ClusterSecurity

    if not directory.encrypted:
        return Security()
    key = bytes.fromhex(checked_files.read(directory.tls / "ucx.key").decode())
    return ClusterSecurity(key) if directory.authenticated else ClusterSecurity(key, **_files(directory.tls))


def environment(directory: ClusterDirectory) -> dict[str, str]:
    """Return the dask configuration of a process in a job, as environment variables.

    They hold only paths. Empty if TLS is off.
    """
    if not directory.tls.is_dir():
        return {}
    env = {ucx_authentication.VARIABLE: str(directory.tls / "ucx.key")}
    if directory.authenticated:
        return env
    cert, key = str(directory.tls / "cert.pem"), str(directory.tls / "key.pem")
    prefix = "DASK_DISTRIBUTED__COMM"
    env |= {f"{prefix}__REQUIRE_ENCRYPTION": "True", f"{prefix}__TLS__CA_FILE": cert}
    for role in ("SCHEDULER", "WORKER", "CLIENT"):
        env[f"{prefix}__TLS__{role}__CERT"] = cert
        env[f"{prefix}__TLS__{role}__KEY"] = key
    return env
