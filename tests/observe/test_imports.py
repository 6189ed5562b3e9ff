"""The imports of ``megalith.observe``."""

import subprocess
import sys


def test_records_and_timers_need_no_torch():
    modules = [f"megalith.observe.{name}" for name in ("metrics", "timers", "progress", "machine")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
