"""schemathesis, unmodified, against a live server and its OpenAPI document: `make fuzz-http`.

    CLIENT_VENV/bin/python tests/serve/clients/schemathesis_fuzz.py BASE_URL

Three passes over all paths but the endless event stream, with every check but one: that a body
which fits its schema is accepted, as rules between two fields are not in the document. First what
clients call; then what changes the cluster, which may leave it without a replica or asleep; at last
the knobs, which may leave it far behind a clock that they have sped up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("schemathesis")
CONTROL = "^/(emu/(faults|scale|commands|failures)|sleep|wake_up|reset_prefix_cache)"
KNOBS = "^/emu/knobs$"
ENDLESS = "^/emu/events$"
NOT_CHECKED = "positive_data_acceptance"


def fuzz(base_url: str, *options: str, examples: int) -> int:
    command = [str(PROGRAM), "run", f"{base_url}/openapi.json", "--url", base_url]
    command += ["--max-examples", str(examples), "--seed", "1", "--continue-on-failure"]
    command += ["--checks", "all", "--exclude-checks", NOT_CHECKED, "--no-color", *options]
    with tempfile.TemporaryDirectory() as directory:  # it keeps what it has found where it runs
        return subprocess.run(command, cwd=directory).returncode


def replicas(base_url: str) -> int:
    with urllib.request.urlopen(f"{base_url}/emu/state", timeout=20) as answer:
        return len(json.load(answer)["replicas"])


def main(base_url: str) -> int:
    base_url = base_url.removesuffix("/v1")
    expected = replicas(base_url)
    calls = fuzz(base_url, "--exclude-path-regex", f"{CONTROL}|{KNOBS}|{ENDLESS}", examples=200)
    control = fuzz(base_url, "--include-path-regex", CONTROL, examples=200)
    knobs = fuzz(base_url, "--include-path-regex", KNOBS, examples=100)
    assert replicas(base_url) == expected
    return calls or control or knobs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
