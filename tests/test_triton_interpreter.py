"""Runs the tests of the Triton kernels in Triton's interpreter, in other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


pytest.importorskip("triton", reason="the kernels need Triton")

TESTS = Path(__file__).parent
# The files of a group share a process, because each process imports torch first.
GROUPS = {
    "additive": ["attention/test_kernels.py"],
    "attention": [
        "attention/test_pooled_kernel.py",
        "attention/test_short_kernel.py",
        "attention/test_short_dropout.py",
        "attention/test_statistics_kernel.py",
    ],
    "models": [
        "models/test_gru_kernel.py",
        "models/test_cross_entropy_kernel.py",
        "models/test_forward_attention_kernel.py",
        "models/test_attention_pooling_kernel.py",
    ],
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter")
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_in_the_interpreter(group: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
    files = [str(TESTS / name) for name in GROUPS[group]]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
