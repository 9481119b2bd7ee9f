"""What a step costs outside the workers, in CPU time of one thread: `python tests/benchmarks/bench_engine_step.py`.

EngineCore's part is schedule, update_from_output, serialising and sending; the client's is receiving, decoding and
detokenising. CPU time and not wall time, so that a busy machine does not change the figures much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from tokenizers import Tokenizer

from minivllm.config import BUNDLED_CHECKPOINT, CacheConfig, SchedulerConfig, VllmConfig
from minivllm.core.request import Request
from minivllm.core.sched.scheduler import Scheduler
from minivllm.engine import EngineCoreOutputs, EngineCoreRequest
from minivllm.engine.output_processor import OutputProcessor
from minivllm.outputs import ModelRunnerOutput
from minivllm.sampling_params import SamplingParams

STEPS = 900


def timed(total: dict[str, int], name: str, action: Callable[[], object]) -> object:
    begun = time.thread_time_ns()
    result = action()
    total[name] = total.get(name, 0) + time.thread_time_ns() - begun
    return result


def run(batch: int) -> dict[str, float]:
    """Microseconds per step of each part."""
    config = VllmConfig(
        cache_config=CacheConfig(block_size=16), scheduler_config=SchedulerConfig(max_num_seqs=batch)
    )
    scheduler = Scheduler(config, 64 * batch + 1)
    processor = OutputProcessor(Tokenizer.from_file(str(Path(BUNDLED_CHECKPOINT) / "tokenizer.json")))
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    for i in range(batch):
        scheduler.add_request(Request(str(i), [1, 2, 3], params, STEPS))
        processor.add_request(EngineCoreRequest(str(i), [1, 2, 3], params), None)
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = sender.bind_to_random_port("tcp://127.0.0.1")
    receiver.connect(f"tcp://127.0.0.1:{port}")
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(EngineCoreOutputs)
    total: dict[str, int] = {}
    for step in range(STEPS):
        scheduled = timed(total, "schedule", scheduler.schedule)
        tokens = [[(step * 7 + i * 13) % 2000 + 1] for i in range(batch)]
        result = ModelRunnerOutput([str(i) for i in range(batch)], tokens)
        outputs = timed(total, "update", lambda s=scheduled, r=result: scheduler.update_from_output(s, r))
        data = timed(total, "encode", lambda o=outputs: encoder.encode(EngineCoreOutputs(o)))
        timed(total, "send", lambda d=data: sender.send(d))
        message = timed(total, "client receive", receiver.recv)
        decoded = timed(total, "client decode", lambda m=message: decoder.decode(m))
        timed(total, "client process", lambda d=decoded: processor.process_outputs(d.outputs))
    sender.close()
    receiver.close()
    context.term()
    return {name: nanoseconds / STEPS / 1e3 for name, nanoseconds in total.items()}


def main() -> None:
    for batch in (1, 8, 64):
        parts = run(batch)
        engine = sum(us for name, us in parts.items() if not name.startswith("client"))
        client = sum(us for name, us in parts.items() if name.startswith("client"))
        print(f"batch {batch}: EngineCore {engine:.1f} us, client {client:.1f} us per step")
        print("   " + ", ".join(f"{name} {us:.1f}" for name, us in parts.items()))


if __name__ == "__main__":
    main()
