"""What a user waits for before any work: `import hydra_engine` beside `import torch`, and the command. See README.md.

python benchmarks/imports/main.py             # 15 rounds
python benchmarks/imports/main.py --rounds 5
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from figures import Figures, add_arguments  # noqa: E402

# By name: Python to run in a process of its own. Public names are imported as they are used, so that a plain import of
# the package is less than what any program needs of it.
PROGRAMS = {
    "import torch": "import torch",
    "import torch, again": "import torch",
    "import hydra_engine": "import hydra_engine",
    "what a program takes": "from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask",
    "every public name": "from hydra_engine import *",
    "hydra-engine --help": "import sys; sys.argv[1:] = ['--help']; from hydra_engine.cli import main; main()",
}


def seconds(program: str) -> float:
    """Run a program in a process of its own, which may use bytecode as an installed package does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin_s


def main() -> None:
    """Run all programs in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="how often each is run (default: 15)")
    add_arguments(parser)
    arguments = parser.parse_args()
    rounds, figures = arguments.rounds, Figures("imports")
    for program in PROGRAMS.values():  # writes the bytecode, and fills the system's cache of files
        seconds(program)
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            found[name].append(seconds(program))
    print("| | median | range | median of ratios to `import torch` | range |\n|---|---|---|---|---|")
    for name, each in found.items():
        ratios = [mine / torchs for mine, torchs in zip(each, found["import torch"], strict=True)]
        print(
            f"| {name} | {median(each):.2f} s | {min(each):.2f} to {max(each):.2f} s "
            f"| {median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
        if not name.startswith("import torch"):
            figures.add(f"{name}, times import torch", ratios, better="less")
    figures.save(arguments.json)


if __name__ == "__main__":
    main()
