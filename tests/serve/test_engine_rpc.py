"""gRPC of engines, with the stubs of the package that publishes the protocols."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.serve.live import PREFILL_DECODE, Live, run, tables
from tests.serve.test_fleet import replayed

grpc = pytest.importorskip("grpc", reason="the extra grpc is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("smg_grpc_proto", reason="the extra grpc is not installed")
    from smg_grpc_proto.generated import (
        common_pb2,
        sglang_scheduler_pb2_grpc,
        vllm_engine_pb2_grpc,
    )
    from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
    from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

pytestmark = pytest.mark.filterwarnings("ignore:Protobuf gencode")


def asked(request_id: str, tokens: int, *, stream: bool = True, **more: Any) -> Any:
    """A call of vLLM's."""
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=[5, 6, 7]),
        sampling_params=vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, **more),
        stream=stream,
    )


async def code_of(call: Any) -> Any:
    """The status with which a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return refused.value.code()


def channel(live: Live, index: int = 0) -> Any:
    """A way to a port."""
    rpc = live.server.rpc
    assert rpc is not None
    return grpc.aio.insecure_channel(f"127.0.0.1:{rpc.ports[index]}")


def test_vllms_service_streams_tokens_refuses_aborts_and_tells(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with channel(live) as way:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(way)
            assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
            parts = [part async for part in stub.Generate(asked("one", 4))]
            ids = [list(part.chunk.token_ids) for part in parts[:-1]]
            last = parts[-1].complete
            assert [i for (i,) in ids] == list(last.output_ids)
            assert len(ids) == 4
            assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == (
                "length",
                3,
                4,
            )
            whole = [p async for p in stub.Generate(asked("two", 3, stream=False, n=2))]
            assert [part.complete.index for part in whole] == [0, 1]
            assert live.cluster.stats.by_status["completed"] == 3
            assert live.cluster.pace.requests == 2
            forced = vllm.ChoiceConstraint(choices=["yes"])
            chosen = [p async for p in stub.Generate(asked("c", 9, stream=False, choice=forced))]
            text = live.service.tokenizer.decode(list(chosen[0].complete.output_ids))
            assert text == "yes"

            assert await code_of(stub.Generate(asked("x", 10**6))) == (
                grpc.StatusCode.INVALID_ARGUMENT
            )
            long = stub.Generate(asked("long", 1500))
            await long.read()
            loads = (await stub.GetLoads(vllm.GetLoadsRequest())).loads[0]
            assert (loads.num_running_reqs, loads.num_waiting_reqs) == (1, 0)
            assert loads.num_used_tokens > 0
            await stub.Abort(vllm.AbortRequest(request_ids=["long"]))
            part = await long.read()
            while part.HasField("chunk"):
                part = await long.read()
            assert part.complete.finish_reason == "abort"
            left = stub.Generate(asked("left", 1500))
            await left.read()
            left.cancel()
            await live.until(lambda: live.cluster.open_choices == 0)
            assert live.cluster.stats.by_status["cancelled"] == 2
            info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
            assert (info.server_type, info.kv_role, info.block_size) == ("vllm-grpc", "", 16)
            model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
            assert model.served_model_name == live.service.model
            assert (await stub.FlushCache(common_pb2.FlushCacheRequest())).success
            with pytest.raises(grpc.aio.AioRpcError) as absent:
                await stub.Embed(vllm.EmbedRequest())
            assert absent.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(tmp_path, tables(), check, grpc_port=0)
    replayed(tmp_path)


def test_a_pair_of_vllm_ports_hands_kv_over(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with channel(live, 0) as to_prefill, channel(live, 1) as to_decode:
            prefill = vllm_engine_pb2_grpc.VllmEngineStub(to_prefill)
            decode = vllm_engine_pb2_grpc.VllmEngineStub(to_decode)
            info = await prefill.GetServerInfo(vllm.GetServerInfoRequest())
            assert info.kv_role == "kv_producer"
            first = asked("pair", 1, stream=False)
            first.kv_transfer_params_json = '{"do_remote_decode": true}'
            (half,) = [part async for part in prefill.Generate(first)]
            second = asked("pair", 5)
            second.kv_transfer_params_json = half.complete.kv_transfer_params_json
            parts = [part async for part in decode.Generate(second)]
            assert len(parts) == 6
            assert live.cluster.stats.transfer.observed > 0
            assert await code_of(decode.Generate(asked("alone", 5))) == (
                grpc.StatusCode.INVALID_ARGUMENT
            )
            fault = {"kind": "replica_crash", "replica": 1, "duration_s": 3600.0}
            await live.client.post("/emu/faults", json=fault)
            assert not (await decode.HealthCheck(vllm.HealthCheckRequest())).healthy
            second.request_id = "dead"
            assert await code_of(decode.Generate(second)) == grpc.StatusCode.UNAVAILABLE

    run(tmp_path, tables(replicas=PREFILL_DECODE), check, fleet=True, grpc_port=0)


def test_sglangs_service_streams_and_pairs_meet_by_room(tmp_path: Path) -> None:
    def call(request_id: str, room: int) -> Any:
        return sglang.GenerateRequest(
            request_id=request_id,
            tokenized=sglang.TokenizedInput(input_ids=[1, 2, 3]),
            sampling_params=sglang.SamplingParams(max_new_tokens=6, ignore_eos=True),
            disaggregated_params=sglang.DisaggregatedParams(
                bootstrap_host="127.0.0.1", bootstrap_port=8998, bootstrap_room=room
            ),
            stream=True,
        )

    async def collect(call: Any) -> list[Any]:
        return [part async for part in call]

    async def check(live: Live) -> None:
        async with channel(live, 0) as to_prefill, channel(live, 1) as to_decode:
            prefill = sglang_scheduler_pb2_grpc.SglangSchedulerStub(to_prefill)
            decode = sglang_scheduler_pb2_grpc.SglangSchedulerStub(to_decode)
            halves = await asyncio.gather(
                collect(prefill.Generate(call("a", 7))), collect(decode.Generate(call("a", 7)))
            )
            assert halves[1][-1].complete.completion_tokens == 6
            assert halves[1][-1].request_id == "a"
            assert len(halves[1]) == 7
            info = await decode.GetServerInfo(sglang.GetServerInfoRequest())
            assert info.server_args["disaggregation_mode"] == "decode"
            loads = (await decode.GetLoads(sglang.GetLoadsRequest())).loads
            assert loads[0].num_total_reqs == 0
            await prefill.FlushCache(common_pb2.FlushCacheRequest())
            assert (await prefill.HealthCheck(sglang.HealthCheckRequest())).healthy
            model = await prefill.GetModelInfo(sglang.GetModelInfoRequest())
            assert model.is_generation
            assert not (await prefill.Abort(sglang.AbortRequest(request_id="none"))).success

    options = {"fleet": True, "grpc_port": 0, "face": "sglang"}
    run(tmp_path, tables(replicas=PREFILL_DECODE), check, **options)


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    async def check(live: Live) -> None:
        async with channel(live) as way:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(way)
            assert await code_of(stub.Generate(asked("one", 2))) == (
                grpc.StatusCode.UNAUTHENTICATED
            )
            key = (("authorization", "Bearer secret"),)
            parts = [part async for part in stub.Generate(asked("two", 2), metadata=key)]
            assert len(parts) == 3

    run(tmp_path, tables(), check, grpc_port=0, api_key="secret")
