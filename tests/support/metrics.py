"""What docs/metrics.md promises, and what an endpoint shows."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

TABLE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def documented(*, node: bool) -> dict[str, str]:
    """Name and kind of each metric in the table: the nodes' or the tracker's."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", TABLE.read_text(), re.MULTILINE)
    assert rows
    return {name: kind for name, kind in rows if name.startswith("meshnet_node_") is node}


def shown(text: str) -> dict[str, str]:
    """The same of an endpoint's answer; without the times at which the client library began to count."""
    families = [f for f in text_string_to_metric_families(text) if not f.name.endswith("_created")]
    return {f.name + ("_total" if f.type == "counter" else ""): f.type for f in families}
