"""What the launchers start, seen with stand-ins for Slurm's own commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

SCRIPTS = Path(__file__).parents[2] / "scripts" / "slurm"
STAND_INS = {
    "scontrol": 'printf "node7\\nnode8\\n"',
    "srun": 'shift; for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@"; done',
    "torchrun": 'echo "torchrun $*"',
    "python": 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK python $*"',
}


@pytest.fixture
def launch(tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "42", "JOB_NODELIST": "node[7-8]", "JOB_NUM_NODES": "2", "NTASKS": "2"}
    environment = {
        **os.environ,
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "SLURM_GPUS_ON_NODE": "4",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }

    def run(script: str, *words: str) -> list[str]:
        done = subprocess.run(
            ["bash", str(SCRIPTS / script), *words], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_torchrun_knows_every_word_of_the_launch(launch):
    """And gives the processes longer to save than its own half a minute, but less than Slurm gives it."""
    (_, *words), *_ = (line.split() for line in launch("train.sbatch", "shards/", "--out", "run/"))
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_id) == ("2", "4", "42")
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint) == ("c10d", "node7:29500")
    assert (parsed.module, parsed.training_script) == (True, "eagle_cli.main")
    assert parsed.training_script_args == ["train", "shards/", "--out", "run/"]
    text = (SCRIPTS / "train.sbatch").read_text()
    (before_the_end,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, flags=re.M)
    (to_save,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text, flags=re.M)
    assert 30 < int(to_save) < int(before_the_end)


def test_training_meets_at_the_first_node_with_a_process_for_each_gpu(launch):
    for line in launch("train.sbatch", "shards/", "--recipe", "my recipe.yaml", "--out", "run/"):
        assert line == (
            "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id 42 --rdzv-backend c10d "
            "--rdzv-endpoint node7:29500 -m eagle_cli.main train shards/ --recipe my recipe.yaml --out run/"
        )


def test_extraction_gives_every_process_its_rank_and_no_rendezvous(launch):
    words = ["rows/", "--target", "a b", "--out", "shards/"]
    assert launch("extract.sbatch", *words) == [
        f"{i}/2 {i} python -m eagle_cli.main extract rows/ --target a b --out shards/" for i in (0, 1)
    ]
