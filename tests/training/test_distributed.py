"""Two processes under torchrun, as several GPUs would be used."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
from pathlib import Path
from test_trainer import silent, texts, tiny_target, trainer_in

trainer = trainer_in(Path(sys.argv[1]), tiny_target(), texts(8), answers_per_step=1)
trainer.run(silent)
sums = {name: float(tensor.detach().double().abs().sum()) for name, tensor in trainer._parameters.items()}
Path(sys.argv[1], f"rank{trainer.rank}.json").write_text(json.dumps([trainer.world, sums]))
"""


def test_processes_stay_in_step(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    )
    for folder, launcher in (
        ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
        ("one", []),
    ):
        (tmp_path / folder).mkdir()
        done = subprocess.run(
            [sys.executable, *launcher, str(script), str(tmp_path / folder)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / "two" / f"rank{rank}.json").read_text()) for rank in range(2))
    alone = json.loads((tmp_path / "one" / "rank0.json").read_text())
    assert first[0] == second[0] == 2 and alone[0] == 1
    assert first[1] == second[1], "the processes' weights have drifted apart"
    assert first[1] != alone[1], "the second process's gradients had no effect"
