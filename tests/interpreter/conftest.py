"""These tests run in a process of their own: TRITON_INTERPRET=1 pytest tests/interpreter."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
