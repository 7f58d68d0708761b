"""`python -m pagedkv kv-bytes`: shapes from config.json, and errors for files without one."""

import json
from pathlib import Path

import pytest

from pagedkv.__main__ import main
from pagedkv.trace.model import MOST_CONFIG_BYTES, read_config

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "which-models.md"
LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "bfloat16"}
EXPECTED = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA | {"num_key_value_heads": 8}, EXPECTED),
        (LLAMA, EXPECTED | {"num_kv_heads": 32}),
        (LLAMA | {"head_dim": 64}, EXPECTED | {"num_kv_heads": 32, "head_dim": 64}),
        (LLAMA | {"head_dim": None, "num_key_value_heads": None}, EXPECTED | {"num_kv_heads": 32}),
        ({"text_config": LLAMA, "num_hidden_layers": 2}, EXPECTED | {"num_kv_heads": 32}),
        (LLAMA | {"text_config": None}, EXPECTED | {"num_kv_heads": 32}),
    ],
)
def test_the_shape_of_a_model(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json"))
    assert read_config(str(tmp_path)).shape == expected


def config_of(num_layers, full_every, window, **shape):
    """The config.json of a model in which every n-th layer sees all tokens."""
    kinds = ["sliding_attention" if (i + 1) % full_every else "full_attention" for i in range(num_layers)]
    return LLAMA | {"num_hidden_layers": num_layers, "layer_types": kinds, "sliding_window": window} | shape


GEMMA_27B = config_of(62, 6, 1024, num_key_value_heads=16, head_dim=128)
GPT_OSS_20B = config_of(24, 2, 128, num_key_value_heads=8, head_dim=64)
SMALL = config_of(6, 6, 24, num_key_value_heads=2, head_dim=32, torch_dtype="float32")
GEMMA_4_31B = config_of(60, 6, 1024, num_key_value_heads=16, head_dim=256) | {
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
}
GEMMA_3N = config_of(35, 5, 512, num_key_value_heads=2, head_dim=256, num_kv_shared_layers=15)


# Published ones: layers, every n-th without a window, the window, KV heads, those of layers without a window or None
# for as many, and how many layers share K and V.
GEMMA_4 = [
    ("Gemma 4 E2B", 35, 5, 512, 1, None, 20),
    ("Gemma 4 E4B", 42, 6, 512, 2, None, 18),
    ("Gemma 4 12B", 48, 6, 1024, 8, 1, 0),
    ("Gemma 4 26B-A4B", 30, 6, 1024, 8, 2, 0),
    ("Gemma 4 31B", 60, 6, 1024, 16, 4, 0),
]


def printed(tmp_path, capsys, config, *words):
    """The rows that kv-bytes prints for a config."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["kv-bytes", "--config", str(tmp_path), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


# What the windows need, what the cache takes, and what it would take without windows.
@pytest.mark.parametrize(
    ("config", "words", "needed", "taken", "without", "groups"),
    [
        (
            GEMMA_27B,
            [],
            2982.5 * 2**20,
            3006.875 * 2**20,
            15872 * 2**20,
            "2 without a window, 11 of window 1024; 5 layers each, 3 padding layers in all",
        ),
        (
            GEMMA_27B,
            ["--group-size", "10"],
            2982.5 * 2**20,
            3047.5 * 2**20,
            15872 * 2**20,
            "1 without a window, 6 of window 1024; 10 layers each, 8 padding layers in all",
        ),
        (
            GPT_OSS_20B,
            [],
            771.375 * 2**20,
            771.375 * 2**20,
            1536 * 2**20,
            "1 without a window, 1 of window 128; 12 layers each, 0 padding layers in all",
        ),
        (
            GEMMA_3N,
            [],
            (4 * 2048 + 16 * 33) * 2**15,
            (4 * 2048 + 16 * 33) * 2**15,
            20 * 2048 * 2**15,
            "1 without a window, 4 of window 512; 4 layers each, 0 padding layers in all",
        ),
    ],
    ids=["Gemma 3 27B", "Gemma 3 27B in groups of 10", "GPT-OSS 20B", "Gemma 3n"],
)
def test_what_windows_need_and_the_cache_takes(tmp_path, capsys, config, words, needed, taken, without, groups):
    head, row = printed(tmp_path, capsys, config, "--num-tokens", "32768", *words)
    assert head["groups of layers"] == groups
    assert row["bytes"] == taken
    assert [row[f"GiB{x}"] * 2**30 for x in ("", " needed", " without windows")] == [taken, needed, without]


@pytest.mark.parametrize(("name", *"nfwhgs"), GEMMA_4, ids=lambda x: str(x))
def test_the_docs_say_what_layers_of_several_shapes_take(tmp_path, capsys, name, n, f, w, h, g, s):
    config = config_of(n, f, w, num_key_value_heads=h, head_dim=256, num_kv_shared_layers=s, model_type="gemma4_text")
    config |= {"global_head_dim": 512, "num_global_key_value_heads": g, "attention_k_eq_v": g is not None}
    head, *rows = printed(tmp_path, capsys, {"text_config": config}, "--num-tokens", "8192", "32768")
    num_full = (n - s) // f
    needed = [2 * 2 * (h * 256 * (n - s - num_full) * w + (g or h) * 512 * num_full * x) for x in (8192, 32768)]
    taken = [row["bytes"] for row in rows]
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        f"{n - s - num_full} of {h} x 256, window {w:,}",
        f"{num_full} of {g or h} x 512",
        head["groups of layers"],
        *(f"{x / 2**20:,.1f} (+{x / least - 1:.1%})" for x, least in zip(taken, needed, strict=True)),
    ]
    assert (head["num_kv_heads"], head["head_dim"]) == (f"{h} and {g}" if g else h, "256 and 512")
    for row in rows:
        assert row["GiB"] * 2**30 == row["bytes"]
        assert row["GiB needed"] <= row["GiB"] < row["GiB without windows"]


@pytest.mark.parametrize(("block_size", "expected"), [("16", 311_296), ("8", 266_240)])
def test_what_a_small_model_takes(tmp_path, capsys, block_size, expected):
    _, row = printed(tmp_path, capsys, SMALL, "--num-tokens", "354", "--block-size", block_size)
    assert row["bytes"] == expected


def test_options_fill_in_what_a_config_leaves_to_its_class(tmp_path, capsys):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"text_config": text, "torch_dtype": "float32"}
    head, _ = printed(tmp_path, capsys, config, "--num-kv-heads", "4", "--head-dim", "256")
    assert (head["head_dim"], head["stored as"], head["bytes of a token"]) == (256, "float32", 34 * 2 * 4 * 256 * 4)
    assert head["groups of layers"].startswith("1 without a window, 6 of window 1024")
    assert main(["kv-bytes", "--config", str(tmp_path), "--num-kv-heads", "4"]) == 2
    assert "it has no head_dim)" in capsys.readouterr().err


def test_what_fits(tmp_path, capsys):
    head, row = printed(tmp_path, capsys, GEMMA_27B, "--num-tokens", "32768", "--memory", "24GiB")
    blocks = 24 * 2**30 // head["of a block of 16"]
    assert head["longest sequence"] == (blocks - 11 * 65) // 2 * 16
    assert (row["blocks"], row["sequences"]) == (2 * 2048 + 11 * 65, 8)
    mistral = config_of(4, 99, 4096)
    assert printed(tmp_path, capsys, mistral, "--memory", "24GiB")[0]["longest sequence"] == "any"
    assert printed(tmp_path, capsys, LLAMA, "--memory", "24GiB")[0]["longest sequence"] == 24 * 2**30 // 2**19


def write_weights(folder, name, num_bytes):
    """A file as `safetensors` writes it, of one tensor; returns the bytes of that."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return num_bytes


def test_what_fits_beside_the_weights(tmp_path, capsys):
    taken = write_weights(tmp_path, "model-1.safetensors", 8000) + write_weights(tmp_path, "model-2.safetensors", 6002)
    options = ["--weights", "--memory", "8MiB", "--num-tokens", "64"]
    head, row = printed(tmp_path, capsys, SMALL, *options)
    assert (head["of the weights"], row["sequences"]) == (taken, (8 * 2**20 - taken) // row["bytes"])
    # Files that the index does not name are other forms of the same weights.
    write_weights(tmp_path, "consolidated.safetensors", 14002)
    index = {"weight_map": {"embed": "model-1.safetensors", "up": "model-1.safetensors", "down": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert printed(tmp_path, capsys, SMALL, *options)[0]["of the weights"] == taken


def test_weights_that_are_not_there(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    command = ["kv-bytes", "--config", str(tmp_path), "--weights"]
    assert main(command) == 2
    assert f"*.safetensors beside config.json, and there are none in {tmp_path}" in capsys.readouterr().err
    assert main(["kv-bytes", "--num-layers", "2", "--num-kv-heads", "2", "--head-dim", "8", "--weights"]) == 2
    assert "--weights needs --config with the folder of a model" in capsys.readouterr().err
    write_weights(tmp_path, "model.safetensors", 2000)
    assert main([*command, "--memory", "2000B"]) == 2
    assert "--memory must be at least" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes((2**40).to_bytes(8, "little"))
    assert main(command) == 2
    assert "model.safetensors is no whole safetensors file: it has 8 bytes" in capsys.readouterr().err
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert main(command) == 2
    assert "index.json does not name the files of the weights in weight_map" in capsys.readouterr().err


# What published configurations say of their layers.
QWEN = {"model_type": "qwen3_5_text", "num_hidden_layers": 64, "num_key_value_heads": 4, "head_dim": 256}
QWEN |= {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16}
QWEN |= {"linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
NANO = {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64}
NANO |= {"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
MAMBA = {"mamba_d_conv": 4, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_d_head": 64}
LFM = {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "conv_L_cache": 3}
HYBRIDS = {
    "Qwen 3.5 27B": {"model_type": "qwen3_5", "text_config": QWEN | {"dtype": "bfloat16"}},
    "Qwen 3.5 35B-A3B": QWEN
    | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_key_value_heads": 2}
    | {"linear_num_value_heads": 32},
    "Qwen 3-Next 80B-A3B": QWEN
    | {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_key_value_heads": 2, "linear_num_value_heads": 32},
    "Nemotron 3 Nano 30B-A3B": NANO
    | {"model_type": "nemotron_h", "num_hidden_layers": 52, "num_key_value_heads": 2, "head_dim": 128},
    "Granite 4.0 H Small": MAMBA
    | {"model_type": "granitemoehybrid", "num_hidden_layers": 40, "num_key_value_heads": 8, "head_dim": 128}
    | {"layer_types": ["mamba" if layer % 10 != 5 else "attention" for layer in range(40)]},
    "Falcon-H1 7B": MAMBA
    | {"model_type": "falcon_h1", "num_hidden_layers": 44, "num_key_value_heads": 2, "head_dim": 128}
    | {"mamba_n_heads": 24, "mamba_d_head": "auto", "mamba_d_state": 256, "mamba_d_ssm": 3072},
    "LFM2 1.2B": LFM | {"model_type": "lfm2", "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_key_value_heads": 8},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_docs_say_what_states_take(tmp_path, capsys, name):
    head, row = printed(tmp_path, capsys, {"torch_dtype": "bfloat16"} | HYBRIDS[name], "--memory", "24GiB")
    read = read_config(str(tmp_path))
    token, state = head["bytes of a token"], head["of a state"]
    page = (Path(__file__).parents[2] / "docs" / "howto" / "which-models.md").read_text()
    [line] = [line for line in page.split("## What states take")[1].splitlines() if line.startswith(f"| {name} |")]
    mib = f"{state / 2**20:.1f}" if state > 2**20 else f"{state / 2**20:.2f}"
    sizes = [f"{token // 1024} KiB", f"{mib} MiB", f"{head['a state in tokens']:,} tokens"]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        str(len(read.states.layers)),
        str(head["num_layers"]),
        *sizes,
    ]
    assert row["sequences"] == 24 * 2**30 // (4096 * token + state)
    assert head["longest sequence"] == (24 * 2**30 - state) // (16 * token) * 16


def test_a_state_that_does_not_fit(tmp_path, capsys):
    head, row = printed(tmp_path, capsys, HYBRIDS["Qwen 3.5 27B"], "--memory", "100MiB")
    assert (head["longest sequence"], row["sequences"]) == (0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("null", "it must be a JSON object, got null"),
        (json.dumps({"text_config": []}), "its text_config must be a JSON object, got []"),
        ("{}", "it has no num_hidden_layers, num_key_value_heads, head_dim"),
        (json.dumps(LLAMA | {"hidden_size": "4096"}), "hidden_size must be an int, got str"),
        (json.dumps(LLAMA | {"kv_lora_rank": 512}), "(it caches latent keys and values (MLA))"),
        (
            json.dumps({"text_config": GEMMA_4_31B}),
            "(it has more than one head_dim (global_head_dim = 512, elsewhere 256))",
        ),
        (
            json.dumps(LLAMA | {"sliding_window": 8, "layer_types": ["full_attention"]}),
            "layer_types must have 32 entries",
        ),
        (json.dumps(LLAMA | {"layer_types": 5}), "(layer_types must be a list with a name for each layer, got int)"),
        (json.dumps(LLAMA | {"model_type": "jamba", "mamba_d_state": 16}), "(Mamba 1) that begin each chunk"),
        *(
            (
                json.dumps(LLAMA | {name: value}),
                "(it has layers with a state of a kind that pagedkv does not know)",
            )
            for name, value in [
                ("mamba_d_state", 16),
                ("linear_key_head_dim", 128),
                ("lru_width", 2560),  # RecurrentGemma
                ("conv_L_cache", 3),
                ("attn_type_list", [0, 1]),  # MiniMax
                ("layers_block_type", ["mamba"] * 32),
            ]
        ),
        (json.dumps(LLAMA | {"model_type": "lfm2", "full_attn_idxs": [3]}), "it has no conv_L_cache"),
        (
            json.dumps(LLAMA | MAMBA | {"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 32}),
            "it has no layer with keys and values",
        ),
        (json.dumps(LLAMA | {"dtype": "int4"}), "dtype must be float32, float16 or bfloat16, got 'int4'"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        (json.dumps(LLAMA | {"num_hidden_layers": 10**3999}), "the K and V take more than 2**63 bytes"),
        (json.dumps(LLAMA | {"hidden_size": float("nan")}), "hidden_size must be an int, got float"),
        (json.dumps(LLAMA | {"dtype": "float32,("}), "dtype must be"),
        (" " * (MOST_CONFIG_BYTES + 1), f"it has more than {MOST_CONFIG_BYTES} bytes"),
    ],
)
def test_configs_that_say_no_shape(tmp_path, text, message, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main(["kv-bytes", "--config", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "config.json does not say the shape of a model (" in line
    assert message in line
    assert line.endswith(": give --num-layers, --num-kv-heads and --head-dim")


def test_layers_of_several_shapes_are_all_of_a_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4_31B | {"model_type": "gemma4_text"}))
    assert main(["kv-bytes", "--config", str(tmp_path), "--num-layers", "2"]) == 2
    assert "--num-layers must be left out, since the layers of --config have several shapes" in capsys.readouterr().err
    assert main(["kv-bytes", "--config", str(tmp_path), "--head-dim", "128", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["head_dim"] == 128


def test_kv_bytes_of_a_model_on_the_command_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": 8}))
    assert main(["kv-bytes", "--config", str(tmp_path), "--num-tokens", "1", "4096", "--json"]) == 0
    shape, one, many = json.loads(capsys.readouterr().out)["rows"]
    assert shape["stored as"] == "bfloat16"
    assert (shape["bytes of a token"], shape["of a block of 16"]) == (2**17, 2**21)
    assert (one["blocks"], one["bytes"]) == (1, 2**21)
    assert (many["blocks"], many["GiB"]) == (256, 0.5)
    assert main(["kv-bytes", "--config", str(tmp_path), "--kv-dtype", "fp8_e4m3", "--num-layers", "16"]) == 0
    assert "fp8_e4m3" in (out := capsys.readouterr().out)
    assert out.split()[-1] == "0.125"
    assert main(["kv-bytes", "--config", str(tmp_path), "--kv-dtype", "int8", "--json"]) == 0
    shape, _ = json.loads(capsys.readouterr().out)["rows"]
    assert (shape["stored as"], shape["bytes of a token"]) == ("int8", 2**16 * 132 // 128)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the model's shape is missing: give --num-layers, --num-kv-heads, --head-dim, or --config with its"),
        (["--num-layers", "2", "--head-dim", "64"], "missing: give --num-kv-heads, or --config"),
        (
            ["--config", "google/gemma-3-27b-it"],
            "--config google/gemma-3-27b-it cannot be read (No such file or directory): give a model's config.json, or "
            "the folder with it; a model of the Hub has to be downloaded first",
        ),
        (["--num-layers", "2", "--num-kv-heads", "1", "--head-dim", "9"], "head_dim must be a multiple of 8"),
        (
            ["--num-layers", "2", "--num-kv-heads", "1", "--head-dim", "8", "--num-tokens", "-1"],
            "num_tokens must be at",
        ),
    ],
)
def test_incomplete_options_are_refused(words, message, capsys):
    assert main(["kv-bytes", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
