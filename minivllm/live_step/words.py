"""What a process of a live step-through is doing, in words, and for whom it waits.

vLLM 0.25.1: none
Articles: part 1 §5, part 2 §2.4.4
"""

from __future__ import annotations

import time

from minivllm.live_step.server import Halt, Peer, Server
from minivllm.stepper.words import Status
from minivllm.timeline import text as words
from minivllm.timeline.meetings import START_UP_MEETINGS


def status(server: Server, peer: Peer) -> Status:
    """The same words as for a recorded run, without what only a recording knows."""
    at = peer.at
    if peer.ended:
        where = f" in {at.span}" if at is not None and peer.ended == "died" else ""
        return Status("dead" if peer.ended == "died" else "ended", f"has {peer.ended}{where}")
    others = "; ".join(
        f"thread {halt.thread_name} before {halt.span}" for halt in list(peer.halts.values())[1:]
    )
    if (halt := peer.first_halt) is not None:
        thread = "" if halt.thread_name == "MainThread" else f"thread {halt.thread_name} "
        return Status("waiting", f"{thread}stopped before {halt.span}", note=others)
    if at is None:
        return Status("starting", "has begun")
    kind = "idle" if at.span in ("worker.busy_loop", "run") else "working"
    waits = waits_for(server, peer, at)
    return Status("waiting" if waits else kind, f"in {at.span}", note=waits)


def waits_for(server: Server, peer: Peer, inside: Halt) -> str:
    """`waits for rank 1, which is stopped before worker.init_device`; "" when it waits for nobody that is known."""
    late = _late(server, peer, inside)
    if not late:
        return ""
    first = late[0].at
    doing = ""
    if first is not None:
        verb = "is stopped before" if late[0].halts else "is in"
        doing = f", which {verb} {first.span}" if len(late) == 1 else f"; {late[0].name} {verb} {first.span}"
    ranks = [other.rank for other in late if other.rank is not None]
    return f"waits for {words.ranks(ranks) if ranks else late[0].name}{doing}"


def _late(server: Server, peer: Peer, inside: Halt) -> list[Peer]:
    """Those whose coming would let it go on."""
    workers = [other for _, other in sorted(server.workers.items()) if other is not peer]

    def have_not_entered(span: str, group: str = "", times: int = 1) -> list[Peer]:
        return [other for other in workers if not other.ended and other.entered[span, group] < times]

    if inside.span == "engine_core.ready":
        return [other for other in server.peers if other.role == "engine_core" and not other.ended]
    if inside.span == "executor.wait_for_ready":
        return have_not_entered("worker.send_ready")
    if inside.span == "executor.mq_handshake":
        return have_not_entered("worker.mq_handshake")
    if inside.span == "worker.mq_handshake":
        executors = [other for other in server.peers if other.role != "worker" and not other.ended]
        if any(other.entered["executor.mq_handshake", ""] for other in executors):
            return have_not_entered("worker.mq_handshake")
        return [other for other in executors if other.entered["executor.init", ""]] or have_not_entered(
            "worker.send_ready"
        )
    if inside.span.startswith("executor.terminate_"):
        return [other for other in workers if not other.ended]
    if inside.span in START_UP_MEETINGS and peer.role == "worker":
        group = inside.attributes.get("group", "")
        members = peer.groups.get(group)
        missing = have_not_entered(inside.span, group, peer.entered[inside.span, group])
        # Every rank takes part in the making of every group, but only its members in its collectives.
        if members and inside.span != "dist.new_group":
            missing = [other for other in missing if other.rank in members]
        return missing
    return []


def since(halt: Halt) -> str:
    return words.duration((time.monotonic() - halt.since) * 1e9)
