"""What pytest does before the tests: paths to the scripts and to common.py, one thread, no network."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
for folder in (TESTS, ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
