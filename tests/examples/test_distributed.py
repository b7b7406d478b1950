"""The example runs over a VirtualMesh, and over processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from examples import distributed
from tsfunc import VirtualMesh
from tsfunc.testing import spawn


def on_a_mesh(rank: int, size: int, shape: tuple[int, int]) -> None:
    distributed.main(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))


def test_the_example_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    distributed.main(VirtualMesh(dp=2, tp=2))
    assert "equal to whole tensors" in capsys.readouterr().out


def test_the_example_on_two_processes() -> None:
    spawn(on_a_mesh, 2, (2, 1), timeout=300.0)
    spawn(on_a_mesh, 2, (1, 2), timeout=300.0)


def test_the_example_by_torchrun(tmp_path: Path) -> None:
    file = Path(distributed.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", str(file)]  # fmt: skip
    environment = dict(os.environ, PYTHONPATH=str(file.parents[1]), OMP_NUM_THREADS="1")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal to whole tensors over DeviceMesh") == 2


@pytest.mark.slow
def test_the_example_on_four_processes() -> None:
    spawn(on_a_mesh, 4, (2, 2), timeout=300.0)
