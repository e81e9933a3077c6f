"""Attention sites that share their remarks, such as those of equal layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attngraph.reports.report import Site


@dataclass(frozen=True)
class SiteGroup:
    """Sites that differ in nothing but their module; `site` is the first of them."""

    site: Site
    modules: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def name(self) -> str:
        """`layers.0.attention`, or the first and the last of several, with their number."""
        named = [module or "the model" for module in self.modules]
        if len(named) == 1:
            return named[0]
        if len(set(named)) == 1:
            return f"{named[0]} ({len(named)} attentions)"
        return f"{named[0]} … {named[-1]} ({len(named)} attentions)"


def site_groups(sites: Iterable[Site]) -> list[SiteGroup]:
    """The declined ones first, each kind in the order of the graph."""
    found: dict[object, list[Site]] = {}
    for site in sites:
        # What is said of a blamed node and of a cache has names of the layer in it.
        blamed = site.blamed.partition(" (")[0]
        key = (
            *(site.status, site.op, site.code, site.reason, site.location, site.hint, blamed),
            *(site.mask, bool(site.cache), site.merged, str(site.kernel)),
        )
        found.setdefault(key, []).append(site)
    groups = [SiteGroup(same[0], tuple(site.module for site in same)) for same in found.values()]
    return sorted(groups, key=lambda group: group.site.status != "declined")
