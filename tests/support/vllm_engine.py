"""Runs whole vLLM engines on the CPU: one process forked for each, so that vLLM is imported once.

``python vllm_engine.py`` reads jobs from stdin, as JSON lines, and answers each with a line: the answers, vLLM's log,
and the error if there was one. A job: the model's directory, arguments of ``LLM``, environment variables, directories
to reload weights from, directories to send weights from (each with a part of names that are left out), the number of
ranks that run the model on prompts of their own (data parallelism), environment variables of all ranks but the first,
and how often to ask again.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

PROMPTS = ("123+456=", "7+8=", "500-123=", "999+1=", "42-17=")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DISABLE_COMPILE_CACHE": "1",  # keys of polymoe's plans would stay in it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


def answers(llm: Any, rank: int = 0) -> list[str]:
    """Greedy answers to :data:`PROMPTS`, or to some of them, so that ranks have different numbers of tokens."""
    from vllm import SamplingParams

    found = llm.generate(list(PROMPTS[2 * rank :]), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return [output.outputs[0].text for output in found]


def give_cpus_collectives() -> None:
    """Give vLLM's communicator of CPUs the two collectives of data parallelism that it has on GPUs only."""
    import torch
    from torch import Tensor
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
        sizes = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self: Any, input_: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
        total = input_.float()
        torch.distributed.all_reduce(total, group=self.device_group)
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        return total.split(sizes)[self.rank_in_group].to(input_.dtype)

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def let_cpus_balance() -> None:
    """Let vLLM balance experts (EPLB) on CPUs: elsewhere than on GPUs it refuses to, maps no ids to the copies of their
    experts, and its model runner sets nothing up. What moves experts is vLLM's own."""
    from types import SimpleNamespace

    import torch
    from torch import Tensor
    from vllm.config import parallel
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.model_executor.layers.fused_moe.router import base_router
    from vllm.model_executor.models.interfaces import get_mixture_of_experts_model
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    platform, load = parallel.current_platform, CPUModelRunner.load_model

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(platform, name)

        def is_cuda_alike(self) -> bool:
            return True

    def map_and_record(
        topk_ids: Tensor,
        expert_load_view: Tensor,
        logical_to_physical_map: Tensor,
        logical_replica_count: Tensor,
        **_: Any,
    ) -> Tensor:
        ids = topk_ids.long()
        copy = torch.arange(len(ids))[:, None] % logical_replica_count[ids]
        found = logical_to_physical_map[ids, copy]
        expert_load_view.scatter_add_(0, found.flatten(), torch.ones(found.numel(), dtype=expert_load_view.dtype))
        return found.to(topk_ids.dtype)

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        torch.Event.elapsed_time = lambda *_: 0.0  # pyright: ignore  # of vLLM's own events of CPUs
        self.eplb_state = EplbState(self.parallel_config, self.device)
        self._moe_model = get_mixture_of_experts_model(self.model)
        self.eplb_state.add_model(self._moe_model, self.model_config)
        self.eplb_state.device_index = 0
        self.eplb_state.start_async_loop()

    parallel.current_platform = Platform()
    base_router.eplb_map_to_physical_and_record = map_and_record
    stream = SimpleNamespace(synchronize=lambda: None)
    torch.Stream = torch.accelerator.current_stream = lambda *_, **__: stream
    torch.accelerator.set_stream = torch.accelerator.set_device_index = lambda *_: None
    CPUModelRunner.load_model = load_model


def say_where_experts_are(worker: Any) -> None:
    """Print the experts of each layer in the order of their places, on the first rank."""
    from vllm.distributed.parallel_state import get_ep_group

    (state,) = worker.model_runner.eplb_state.model_states.values()
    if get_ep_group().rank_in_group == 0:
        print(f"experts held: {state.physical_to_logical_map.tolist()}", flush=True)


def run(job: dict[str, Any], rank: int = 0) -> list[list[str]]:
    """Start an engine and ask it, and again after each reload."""
    from vllm import LLM

    if job.get("ranks", 1) > 1:
        give_cpus_collectives()
    balanced = job.get("options", {}).get("enable_eplb")
    if balanced:
        let_cpus_balance()
    given = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 8, "disable_log_stats": True}
    llm = LLM(job["model"], **{**given, **job.get("options", {})})
    found = []
    for _ in range(1 + job.get("again", 0)):
        found.append(answers(llm, rank))
        if balanced:
            llm.collective_rpc(say_where_experts_are)
    for path in job.get("reload", ()):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        found.append(answers(llm))
    for path, without in job.get("sent", ()):
        llm.collective_rpc(load_sent, args=(path, without))
        found.append(answers(llm))
    return found


def load_sent(worker: Any, path: str, without: str) -> None:
    """Load experts in buckets by the model's own ``load_weights``, as trainers do; none whose name has ``without``.

    Only experts: on CPUs vLLM replaces weights of linear layers, and cannot load them again in this way.
    """
    from safetensors.torch import load_file

    tensors = [pair for file in sorted(Path(path).glob("*.safetensors")) for pair in load_file(file).items()]
    tensors = [(n, tensor) for n, tensor in tensors if ".experts." in n and not (without and without in n)]
    for bucket in range(3):
        worker.model_runner.model.load_weights(iter(tensors[bucket::3]))


def _child(job: dict[str, Any], log: str, results: Any, rank: int, port: int) -> None:
    with open(log, "w", buffering=1) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        os.environ.update(job.get("environment", {}) | (job.get("others", {}) if rank else {}))
        if job.get("ranks", 1) > 1:
            os.environ |= {
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": str(job["ranks"]),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
            }
        try:
            results.send({"answers": run(job, rank), "error": ""})
        except BaseException as error:
            traceback.print_exc()
            results.send({"answers": [], "error": f"{type(error).__name__}: {error}"})
        sys.stdout.flush()
        os._exit(0)  # vLLM's threads and atexit handlers may wait for each other


def main() -> None:
    """Answer the jobs of stdin."""
    os.environ.update(ENVIRONMENT)
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401

    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryDirectory() as directory:
            started = []
            port = _free_port()
            for rank in range(job.get("ranks", 1)):
                log = Path(directory, f"log{rank}")
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=_child, args=(job, str(log), theirs, rank, port))
                process.start()
                theirs.close()
                started.append((process, ours, log))
            found = _results(started)
            logs = [log.read_text(errors="replace") for _, _, log in started]
        first = {**found[0], "error": next((rank["error"] for rank in found if rank["error"]), "")}
        print(
            json.dumps({**first, "log": "".join(logs), "others": [rank["answers"] for rank in found[1:]]}), flush=True
        )


def _free_port() -> int:
    """A port below those that the system gives to connections: vLLM listens only later, also on those after it."""
    for port in random.sample(range(12000, 30000, 10), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def _results(started: list[tuple[Any, Any, Path]]) -> list[dict[str, Any]]:
    """What the ranks sent, once they have ended. When one has failed, others may wait for it: they have a minute."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(started):
        waiting = {ours: rank for rank, (_, ours, _) in enumerate(started) if rank not in found}
        failed = any(result["error"] for result in found.values())
        ready = multiprocessing.connection.wait(list(waiting), 60 if failed else None)
        for ours in ready:
            rank: int = waiting[ours]  # type: ignore[index]
            try:
                found[rank] = ours.recv()  # type: ignore[union-attr]
            except EOFError:
                found[rank] = {"answers": [], "error": f"rank {rank} ended with {started[rank][0].exitcode}"}
        for rank in waiting.values() if not ready else ():
            started[rank][0].kill()
    for process, _, _ in started:
        process.join(30)
        if process.is_alive():
            process.kill()
    return [found[rank] for rank in range(len(started))]


if __name__ == "__main__":
    main()
