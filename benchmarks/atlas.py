"""One atlas of all methods: what each costs and what it loses, on the same models, data, seeds and tokens.

    python benchmarks/atlas.py --quick                                 # 8 workers, one seed; or `make atlas`
    python benchmarks/atlas.py --full --json benchmarks/results/atlas.json --out docs

`benchmarks/atlas/` has the methods, the tasks, the runs, the tables and the pictures.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # as for `python -m`: here `atlas` is this file and a folder

from benchmarks.atlas.runs import main  # noqa: E402

if __name__ == "__main__":
    main()
