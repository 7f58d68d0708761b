"""Train the example's transformer on Python's own standard library.

    python examples/train.py --minutes 35

needs torch; nothing else in the examples does. The result is examples/weights.npz: fp16 arrays, the tokenizer's
merges and the model's sizes. It is written every few minutes, so an interrupted run leaves usable weights.
`--bf16 --compile` is fastest where the processor and a C++ compiler allow it. On a machine that is busy with other
work set GOMP_SPINCOUNT=0, or torch's threads waste most of their time waiting for each other.

The weights beside this file learnt from the standard library of CPython 3.11 (PSF licence) in about 2700 steps, in two
runs, the second with `--resume`; the loss on the held-out files is 2.15 nats a token, 1.19 bits a byte.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tokenizer import END, Tokenizer, learn_merges

CONFIG = {
    "vocab_size": 1024,
    "dim": 192,
    "num_layers": 5,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "hidden": 416,
    "rope_base": 10000,
    "context": 256,
}
STDLIB = Path(sysconfig.get_paths()["stdlib"])
# Tests, tables, foreign packages, and files unlike usual code.
LEFT_OUT = ["test", "tests", "idle_test", "encodings", "pydoc_data", "entities.py", "stringprep.py", "_sysconfigdata"]
LEFT_OUT += ["site-packages", "lib2to3", "idlelib", "turtledemo", "config-3", "__phello__", "__pycache__", "this.py"]


def read_corpus(root: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the Python sources below `root` as (training files, held-out files); every 25th file is held out."""
    texts = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not any(part == name or part.startswith(name + "_") for part in parts for name in LEFT_OUT):
            texts.append(path.read_bytes().replace(b"\r\n", b"\n").expandtabs(4))
    return [text for i, text in enumerate(texts) if i % 25 != 23], texts[23::25]


class Block(nn.Module):
    """A layer: attention and feed-forward, each with a norm before and a residual around it."""

    def __init__(self, c: dict[str, int]) -> None:
        super().__init__()
        self.c = c
        q_dim, kv_dim = c["num_heads"] * c["head_dim"], c["num_kv_heads"] * c["head_dim"]
        self.attn_norm = nn.Parameter(torch.ones(c["dim"]))
        self.wqkv = nn.Linear(c["dim"], q_dim + 2 * kv_dim, bias=False)
        self.q_norm = nn.Parameter(torch.ones(c["head_dim"]))
        self.k_norm = nn.Parameter(torch.ones(c["head_dim"]))
        self.wo = nn.Linear(q_dim, c["dim"], bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(c["dim"]))
        self.w_in = nn.Linear(c["dim"], 2 * c["hidden"], bias=False)
        self.w_out = nn.Linear(c["hidden"], c["dim"], bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, (batch, length, _) = self.c, x.shape
        h, kv, d = c["num_heads"], c["num_kv_heads"], c["head_dim"]
        qkv = self.wqkv(F.rms_norm(x, (c["dim"],), self.attn_norm, 1e-6)).view(batch, length, h + 2 * kv, d)
        q, k, v = qkv.transpose(1, 2).split([h, kv, kv], dim=1)
        q = rotate(F.rms_norm(q, (d,), self.q_norm, 1e-6), cos, sin)
        k = rotate(F.rms_norm(k, (d,), self.k_norm, 1e-6), cos, sin)
        a = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=True)
        x = x + self.wo(a.transpose(1, 2).reshape(batch, length, h * d))
        gate, up = self.w_in(F.rms_norm(x, (c["dim"],), self.mlp_norm, 1e-6)).chunk(2, dim=-1)
        return x + self.w_out(F.silu(gate) * up)


class Model(nn.Module):
    """The decoder-only transformer that transformer.py computes in NumPy."""

    def __init__(self, c: dict[str, int]) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c["vocab_size"], c["dim"]) * 0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_layers"]))
        self.norm = nn.Parameter(torch.ones(c["dim"]))
        for block in self.blocks:
            for linear in (block.wqkv, block.w_in):
                nn.init.normal_(linear.weight, std=c["dim"] ** -0.5)
            for linear in (block.wo, block.w_out):
                nn.init.zeros_(linear.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        c, length = self.c, tokens.shape[1]
        frequencies = c["rope_base"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angles = torch.arange(length)[:, None] * frequencies
        x = self.embed[tokens]
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return F.rms_norm(x, (c["dim"],), self.norm, 1e-6) @ self.embed.T


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embedding: rotate the pairs (x[i], x[i + d/2])."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def save(model: Model, merges: list[tuple[int, int]], path: Path) -> None:
    """Write weights, merges and sizes to a file, as a whole or not at all."""
    arrays = {name: value.detach().numpy().astype(np.float16) for name, value in model.named_parameters()}
    sizes = {f"config.{name}": np.array(value) for name, value in model.c.items()}
    temporary = path.with_name("new-" + path.name)
    np.savez(temporary, merges=np.array(merges, dtype=np.uint16), **sizes, **arrays)
    temporary.replace(path)


def restore(model: Model, path: Path) -> list[tuple[int, int]]:
    """Read weights that `save` wrote into the model, and return the merges."""
    with np.load(path) as arrays:
        model.load_state_dict({name: torch.from_numpy(arrays[name]) for name, _ in model.named_parameters()})
        return [(int(left), int(right)) for left, right in arrays["merges"]]


def batch_of(tokens: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = tokens[starts[:, None] + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, bf16: bool) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, tokens: torch.Tensor, context: int, bf16: bool, windows: int) -> float:
    """The mean loss in nats per token over windows spread evenly over the held-out tokens."""
    starts = torch.linspace(0, len(tokens) - context - 1, min(windows, len(tokens) // context)).long()
    losses = [loss_of(model, *batch_of(tokens, part, context), bf16) for part in starts.split(16)]
    return float(torch.stack(losses).mean())


def schedule(progress: float) -> float:
    """The learning rate factor: warm up, hold, then fall linearly to zero over the last half."""
    return max(0.0, min(1.0, progress / 0.01, (1 - progress) / 0.5))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example's transformer on the standard library.")
    parser.add_argument("--minutes", type=float, default=35, help="train for this long")
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon, for the matrices")
    parser.add_argument("--adam-lr", type=float, default=0.004, help="of AdamW, for embeddings and norms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="multiply matrices in bfloat16")
    parser.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    parser.add_argument("--text", type=Path, default=STDLIB, help="a folder of .py files")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("weights.npz"))
    parser.add_argument("--resume", type=Path, metavar="WEIGHTS", help="go on from these weights")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    started = time.monotonic()

    train_files, held_out_files = read_corpus(args.text)
    if not held_out_files:
        parser.error(f"{args.text} has fewer than 24 .py files")
    model = Model(CONFIG)
    merges = restore(model, args.resume) if args.resume else learn_merges(train_files, CONFIG["vocab_size"])
    tokenizer = Tokenizer(merges)
    train, held_out = (
        torch.tensor([token for text in texts for token in [END, *tokenizer.encode(text)]])
        for texts in (train_files, held_out_files)
    )
    bytes_per_token = sum(map(len, held_out_files)) / len(held_out)
    print(
        f"{len(train_files)} + {len(held_out_files)} files, {len(train)} + {len(held_out)} tokens, "
        f"{bytes_per_token:.2f} bytes/token, {sum(p.numel() for p in model.parameters())} parameters, "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "embed"]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or name == "embed"]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base_lrs = [args.lr, args.adam_lr]
    forward = torch.compile(model) if args.compile else model
    context = CONFIG["context"]
    started = saved = time.monotonic()
    running, step, progress = math.nan, 0, 0.0
    while progress < 1:
        for optimizer, lr in zip(optimizers, base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = lr * schedule(progress)
        starts = torch.randint(0, len(train) - context, (args.batch,))
        loss = loss_of(forward, *batch_of(train, starts, context), args.bf16)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        running = loss.item() if math.isnan(running) else 0.98 * running + 0.02 * loss.item()
        step += 1
        elapsed = time.monotonic() - started
        progress = step / args.steps if args.steps else elapsed / (60 * args.minutes)
        if step % 50 == 0:
            rate = step * args.batch * context / elapsed
            print(f"step {step} {progress:.1%} loss {running:.3f} {rate:.0f} tokens/s", flush=True)
        if time.monotonic() - saved > 120:
            save(model, merges, args.out)
            print(f"  held-out {evaluate(model, held_out, context, args.bf16, 64):.4f}, saved", flush=True)
            saved = time.monotonic()
    save(model, merges, args.out)
    final = evaluate(model, held_out, context, False, 256)
    print(f"held-out loss {final:.4f} nats/token, {final / bytes_per_token / math.log(2):.3f} bits/byte; {args.out}")


if __name__ == "__main__":
    main()
