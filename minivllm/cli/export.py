"""`minivllm export DIR`: send a recorded run to Jaeger or any OTLP collector, or merge it into one file.

vLLM 0.25.1: no counterpart
Articles: –
"""

from __future__ import annotations

import argparse

from minivllm.cli import common


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        parents=[common.options()],
        help="send a recorded run to Jaeger, or merge it into one OTLP/JSON file",
        description="Send a recorded run to Jaeger or another OTLP collector, or merge the files of its processes into one.",
    )
    parser.add_argument("directory", metavar="DIR", help="the trace directory of the run")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--otlp", metavar="URL", help="an OTLP/HTTP endpoint, such as http://localhost:4318")
    target.add_argument(
        "--otlp-json", metavar="FILE", help="one OTLP/JSON file; Jaeger's upload takes it (- for stdout)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    raise NotImplementedError
