"""Describes in words what is wrong with a certificate or a clock; pure."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Iterable, Mapping
from typing import Any

#: OpenSSL's numbers (X509_verify_cert_error_string): the certificate is not yet valid, it has expired.
_NOT_YET, _EXPIRED = 9, 10
#: TLS alerts of a peer that refuses our certificate. OpenSSL sends `bad_certificate` for one that is not yet valid.
_ALERTS = ("ALERT_CERTIFICATE_EXPIRED", "ALERT_BAD_CERTIFICATE")


def _time(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def problem(begin: float, end: float, *, now: float, host: str, what: str = "the cluster's certificate") -> str:
    """Return why a certificate cannot be used at this time; empty if it can.

    Parameters
    ----------
    begin, end : float
        Start and end of its validity, epoch seconds.
    now : float
        Time on the clock of this machine, epoch seconds.
    host : str
        Name of this machine.
    what : str
        Name of the certificate.
    """
    clock = f"the clock of {host} says {_time(now)}"
    if now < begin:
        return f"{what} is not valid before {_time(begin)}, and {clock}: check the clock of {host}"
    if now > end:
        return f"{what} expired on {_time(end)}, and {clock}: start a new cluster, or render the scripts again"
    return ""


def refusal(error: BaseException | None, peer: str, what: str = "the cluster's certificate") -> str:
    """Return a sentence if a peer refuses our certificate because of its dates; empty for any other error.

    Parameters
    ----------
    error : BaseException or None
        The error of the connection.
    peer : str
        Address of the peer.
    what : str
        Name of the certificate.
    """
    if not isinstance(error, ssl.SSLError) or not any(alert in (error.reason or "") for alert in _ALERTS):
        return ""
    return (
        f"{peer} refuses {what}, although it is valid by the clock of this machine: check the clock of the machine "
        f"at {peer}"
    )


def explain(
    error: BaseException | None, authorities: Iterable[Mapping[str, Any]], *, peer: str, now: float, host: str
) -> str:
    """Return a sentence if a connection failed because of the certificate's dates; empty otherwise.

    Parameters
    ----------
    error : BaseException or None
        Why it failed.
    authorities : iterable of mapping
        What `ssl.SSLContext.get_ca_certs` returns: the certificates of clusters are self-signed.
    peer : str
        Address of the other side.
    now, host
        See `problem`.
    """
    dates = [
        (ssl.cert_time_to_seconds(str(one["notBefore"])), ssl.cert_time_to_seconds(str(one["notAfter"])))
        for one in authorities
    ]
    here = next(filter(None, (problem(begin, end, now=now, host=host) for begin, end in dates)), "")
    if isinstance(error, ssl.SSLCertVerificationError):
        return here if error.verify_code in (_NOT_YET, _EXPIRED) else ""
    refused = refusal(error, peer)
    return here or refused if refused else ""
