"""doctor finds what is wrong and says what helps."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from meshnet.doctor import check_disk, check_engine, check_port, check_tls, check_tracker
from meshnet.service import launchd_plist, systemd_unit


def test_a_well_machine_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshnet", "doctor", "--json"], capture_output=True, text=True
    )
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"python", "engine", "cpu", "memory", "disk"} <= {finding["check"] for finding in findings}
    assert done.returncode == int(any(finding["state"] == "fail" for finding in findings))
    assert all(finding["remedy"] for finding in findings if finding["state"] != "ok")


def test_the_pinned_engine_is_found() -> None:
    finding = check_engine()
    assert finding.state == "ok"
    assert "xllamacpp 2026.10.11549" in finding.detail


def test_a_port_in_use_is_found() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finding = check_port("node gRPC", taken.getsockname()[1])
    assert finding.state == "warn"
    assert "--grpc-port" in finding.remedy


def test_a_tracker_that_is_not_there_is_said_with_what_to_look_at() -> None:
    findings = list(check_tracker("http://127.0.0.1:9"))
    assert [finding.state for finding in findings] == ["fail"]
    assert "--host" in findings[0].remedy


def test_plain_lines_between_machines_are_warned_of() -> None:
    assert check_tls("10.0.0.1", True, "ab").state == "ok"
    assert check_tls("127.0.0.1", False, "").state == "ok"
    plain = check_tls("10.0.0.1", False, "")
    assert plain.state == "warn"
    assert "--insecure" in plain.remedy


def test_disk_of_a_folder_that_is_yet_to_be_made(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "a" / "b").check == "disk"


def test_systemd_unit_quotes_what_needs_it() -> None:
    unit = systemd_unit("node", ["--name", "my box", "--threads", "4"], {"MESHNET_LOG": "json"})
    assert '--name "my box" --threads 4' in unit.text
    assert "Environment=MESHNET_LOG=json" in unit.text
    assert unit.path.name == "meshnet-node.service"


def test_launchd_plist_restarts_on_failure() -> None:
    unit = launchd_plist("tracker", ["--port", "8080"], {})
    assert "<string>--port</string>" in unit.text
    assert "SuccessfulExit" in unit.text
