"""`python -m minivllm`: the `minivllm` command, also where its script is not on the path.

vLLM 0.25.1: no counterpart (`python -m vllm.entrypoints.cli.main`)
Articles: –
"""

import sys

from minivllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
