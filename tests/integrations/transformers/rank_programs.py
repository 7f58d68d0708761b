"""What the ranks of tests run: `run` starts a process that imports all of it once, and forks into the ranks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[3]
PROMPTS = [[1, 5, 3, 9], list(range(2, 24, 2)), list(range(1, 60))]
NUM_NEW = 8
BLOCKS = 64


def run(program, folder, num_ranks=2, seconds=120, **model):
    """Run a function of this file on so many ranks, with a model in a folder: what each returned, by its rank."""
    command = [sys.executable, "-m", __name__, program, str(folder), str(num_ranks), json.dumps(model)]
    threads = {"OMP_NUM_THREADS": "1", "PAGEDKV_NUM_THREADS": "1"}
    # A session of its own, so that a time-out ends the ranks, too: they may wait for each other for ever.
    with subprocess.Popen(command, env=os.environ | threads, cwd=ROOT, start_new_session=True) as process:
        try:
            assert process.wait(seconds) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def load(folder, **options):
    """The part of a model that this rank has."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    sharding = DistributedConfig(**{"tp_plan": "auto"} | options)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharding)


def greedy_tokens(engine):
    """The tokens that requests of all prompts get, and how many blocks are used afterwards."""
    numbers = [engine.add(prompt, NUM_NEW, ignore_eos=True) for prompt in PROMPTS]
    said = {number: [] for number in numbers}
    for sampled in engine.run():
        said[sampled.request].append(sampled.token)
    return list(said.values())


def logprobs(engine):
    """The log-probabilities of the longest prompt and of a token behind it."""
    engine.add(PROMPTS[2], 1, logprobs=0, prompt_logprobs=0)
    [sampled] = engine.run()
    return [*(one.logprob for one in sampled.prompt_logprobs), sampled.logprob]


def generated(model, cache):
    """The tokens of generate with a PagedCache, after prompts with padding."""
    import torch

    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    said = model.generate(ids, attention_mask=(ids > 0).long(), past_key_values=cache, **options)
    return said[:, longest:].tolist()


def message_of(call, *args, **options):
    """The message of the error that a call raises."""
    try:
        call(*args, **options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def same_tokens(rank, folder, **options):
    """All ways to run a model: engines that are called with the same, one that is followed, and generate."""
    from pagedkv.integrations.transformers import Engine, PagedCache, use_pagedkv

    model = load(folder, **options)
    engine = Engine(model, num_blocks=BLOCKS)
    found = {"same": greedy_tokens(engine), "kv_heads": engine.cache.k_caches[0].shape[2]}
    engine.close()
    engine = Engine(model, num_blocks=BLOCKS)
    if rank:
        engine.follow()
    else:
        found["led"] = greedy_tokens(engine)
        engine.close()
    use_pagedkv(model)
    return found | {"generated": generated(model, PagedCache(model, num_blocks=BLOCKS))}


def everything(rank, folder):
    """What ranks do beyond greedy tokens, one after the other."""
    from pagedkv.integrations.transformers import Engine, PagedCache, results

    found = same_tokens(rank, folder)
    model = load(folder)
    found["other setting"] = message_of(Engine, model, num_blocks=BLOCKS, max_num_seqs=4 + rank)
    engine = Engine(model, num_blocks=BLOCKS, kv_dtype="int8")
    found["int8"] = logprobs(engine)
    engine.close()
    found["cache blocks"] = PagedCache(model, num_blocks=BLOCKS + rank).kv.pool.num_blocks

    engine = Engine(model, num_blocks=BLOCKS - rank)
    found["blocks"] = engine.cache.pool.num_blocks
    found["drawn"] = list(engine.tokens(PROMPTS[0], 32, temperature=2.0, ignore_eos=True))
    dropped = engine.tokens(PROMPTS[0], 32, ignore_eos=True)
    next(dropped)
    if rank == 0:
        dropped.close()  # the other rank still has its stream
    engine.step()
    found["after a stream is dropped"] = engine.cache.stats().used
    bad = engine.add(PROMPTS[0], NUM_NEW)
    with mock.patch.object(results, "are_finite", lambda logits: [rank == 0] * len(logits)):
        found["not finite on rank 1"] = [(x.request - bad, x.reason) for x in engine.step()]
    if rank:
        engine.add(PROMPTS[0], NUM_NEW)
    found["other call"] = message_of(engine.step)
    found["after another call"] = message_of(engine.step) if rank else ""

    engine = Engine(model, num_blocks=BLOCKS)
    if rank:
        engine.follow()
        found["closed"] = message_of(engine.step)
    else:
        found["leader follows"] = message_of(engine.follow)
        aborted = engine.add(PROMPTS[2], NUM_NEW, temperature=1.0, ignore_eos=True)
        engine.step()
        engine.abort(aborted)
        stream = engine.tokens(PROMPTS[1], NUM_NEW, ignore_eos=True)
        next(stream)
        stream.close()
        found["refused"] = message_of(engine.add, [10**6], 1)
        found["led after aborts"] = greedy_tokens(engine)
        found["logprobs"] = logprobs(engine)
        engine.close()
    found["used"] = engine.cache.stats().used
    engine.cache.check()
    return found


def main(program, folder, num_ranks, model):
    """Fork into ranks, each with the environment that torchrun gives it, and wait for all."""
    import torch.distributed as dist
    import transformers.generation  # noqa: F401

    from pagedkv.integrations.transformers.ranks import join_ranks

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    children = []
    for rank in range(int(num_ranks)):
        if child := os.fork():
            children.append(child)
            continue
        os.environ |= common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": num_ranks}
        with join_ranks(timeout=30) as joined:
            found = globals()[program](joined, folder, **json.loads(model))
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        os._exit(0)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
