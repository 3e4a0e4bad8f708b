"""Start a live server on a free loopback port, run a client's script against it, stop both.

.venv/bin/python tests/serve/clients/run.py CLIENT_PYTHON "SCRIPT [ARGUMENTS]" [OPTIONS OF SERVE...]

The address comes last among the script's arguments.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def main(python: str, script: str, *options: str) -> int:
    config = Path(__file__).resolve().parents[3] / "configs" / "quickstart.toml"
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "emu", "serve", str(config), "--port", "0"]
        command += ["--startup-s", "0", "-o", directory, *options]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"on (http://[^\s,]+)", server.stdout.readline())
            if found is None:
                return server.wait(600) or 1
            direct = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
            asked = [python, *script.split(), found[1]]
            status = subprocess.run(asked, env=direct, timeout=1200).returncode
        finally:
            server.send_signal(signal.SIGTERM)
            ended = server.wait(600)
        print(f"server exit status {ended}")
        return status or ended


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
