"""The site in containers is what its page says: hosts, users, limits, a late home, GPUs and memory that are enforced."""

from __future__ import annotations

from site_bed import HOSTS, LOGINS, NODES, Site, SiteError


def test_users_have_the_same_uid_everywhere(site: Site) -> None:
    for host in (*LOGINS, *NODES):
        assert site.exec(host, "id -u", user="ada").out == "2001\n"
        assert site.exec(host, "id -u", user="bob").out == "2002\n"
