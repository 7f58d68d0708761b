"""`python -m pagedkv kv-bytes`: shapes from config.json, and errors for files without one."""

import json

import pytest

from pagedkv.__main__ import main
from pagedkv.trace.model import MOST_CONFIG_BYTES, read_config, seen_bytes

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


# Models of 4 or 6 layers; transformers' own configuration classes read them so.
WINDOWS = [
    ({}, [None] * 4),
    ({"sliding_window": 24}, [24] * 4),
    ({"sliding_window": 24, "use_sliding_window": False}, [None] * 4),
    ({"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}, [24, None] * 2),
    ({"sliding_window": 24, "model_type": "gemma2"}, [24, None] * 2),
    ({"sliding_window": 24, "sliding_window_pattern": 6, "num_hidden_layers": 6}, [24] * 5 + [None]),
]


@pytest.mark.parametrize(("changes", "windows"), WINDOWS)
def test_the_windows_of_a_model(tmp_path, changes, windows):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4} | changes))
    assert read_config(str(tmp_path)).windows == windows


@pytest.mark.parametrize(
    ("config", "tokens", "size", "seen"),
    [
        # What is in sight of Gemma 3 27B and of GPT-OSS 20B, and of a small model in blocks of 16 and 8.
        ((62, 16, 128, 6, 1024), 32768, 16, 2982.5 * 2**20),
        ((24, 8, 64, 2, 128), 32768, 16, 771.375 * 2**20),
        ((6, 2, 32, 6, 24), 354, 16, 311_296),
        ((6, 2, 32, 6, 24), 354, 8, 266_240),
    ],
)
def test_how_much_of_a_sequence_is_in_sight(config, tokens, size, seen):
    layers, heads, dim, every, window = config
    windows = [None if (i + 1) % every == 0 else window for i in range(layers)]
    dtype = "float32" if dim == 32 else "bfloat16"
    shape = {"num_layers": layers, "num_kv_heads": heads, "head_dim": dim, "dtype": dtype}
    assert seen_bytes(tokens, windows, size, **shape) == seen


def test_what_is_in_sight_and_what_fits(tmp_path, capsys):
    config = LLAMA | {"num_key_value_heads": 8, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["kv-bytes", "--config", str(tmp_path), "--num-tokens", "32768", "--memory", "10GiB", "--json"]
    assert main(words) == 0
    _, row = json.loads(capsys.readouterr().out)["rows"]
    assert (row["GiB"], row["GiB in sight"], row["sequences"]) == (4.0, 65 * 16 * 2**17 / 2**30, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("null", "it must be a JSON object, got null"),
        (json.dumps({"text_config": []}), "its text_config must be a JSON object, got []"),
        ("{}", "it has no num_hidden_layers, num_key_value_heads, head_dim"),
        (json.dumps(LLAMA | {"hidden_size": "4096"}), "hidden_size must be an int, got str"),
        (json.dumps(LLAMA | {"kv_lora_rank": 512}), "its attention is MLA"),
        (
            json.dumps(LLAMA | {"sliding_window": 8, "layer_types": ["full_attention"]}),
            "layer_types must have 32 entries",
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
    assert line.endswith(": give --num-layers and so on")


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the model's shape is missing: give --num-layers, --num-kv-heads, --head-dim, or --config with its"),
        (["--num-layers", "2", "--head-dim", "64"], "missing: give --num-kv-heads, or --config"),
        (["--config", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
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
