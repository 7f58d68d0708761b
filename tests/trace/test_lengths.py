"""Lengths of requests: drawn, read from several kinds of CSV files, and errors."""

import math

import numpy as np
import pytest

from pagedkv.trace import Requests, log_normal, read_csv


def test_log_normal_lengths_have_the_means_that_were_asked_for():
    requests = log_normal(50_000, prompt_mean=100, output_mean=300, sigma=0.5, max_len=10**6, seed=3)
    assert requests.prompt_lens.mean() == pytest.approx(100, rel=0.02)
    assert requests.output_lens.mean() == pytest.approx(300, rel=0.02)
    assert np.log(requests.output_lens).std() == pytest.approx(0.5, rel=0.02)
    assert abs(np.corrcoef(requests.prompt_lens, requests.output_lens)[0, 1]) < 0.02


def test_without_deviation_every_length_is_the_mean():
    requests = log_normal(5, prompt_mean=100, output_mean=7.4, sigma=0)
    assert requests.prompt_lens.tolist() == [100] * 5
    assert requests.output_lens.tolist() == [7] * 5


def test_the_seed_decides():
    first, again, other = (log_normal(100, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.seq_lens, again.seq_lens)
    assert not np.array_equal(first.seq_lens, other.seq_lens)


@pytest.mark.parametrize("max_len", [2, 3, 64])
def test_prompt_and_output_have_a_token_each_and_fit_together(max_len):
    requests = log_normal(300, sigma=3, max_len=max_len)
    assert min(requests.prompt_lens.min(), requests.output_lens.min()) == 1
    assert requests.seq_lens.max() == max_len


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ({"max_len": 1}, "max_len must be at least 2, got 1"),
        ({"prompt_mean": 0.5}, "prompt_mean must be from 1 to 2147483647, got 0.5"),
        ({"output_mean": math.inf}, "output_mean must be from 1 to 2147483647, got inf"),
        ({"sigma": math.nan}, "sigma must be from 0 to 10, got nan"),
        ({"sigma": -1}, "sigma must be from 0 to 10, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_wrong_distributions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        log_normal(**{"num_requests": 5} | arguments)


@pytest.mark.parametrize(
    ("prompts", "outputs", "message"),
    [
        ([], [], "requests must be at least one, got none"),
        ([1, 2], [1], r"output_lens must have shape \(num_requests,\) = \(2,\), got \(1,\)"),
        ([1, 0], [1, 1], r"prompt_lens must be from 1 to 2\*\*31 - 1, got 0 to 1"),
        ([1, 1], [1, 2**31], r"output_lens must be from 1 to 2\*\*31 - 1, got 1 to 2147483648"),
    ],
)
def test_wrong_lengths_are_refused(prompts, outputs, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Requests(prompts, outputs)


FILES = {
    "ours": "prompt_tokens,output_tokens\n5,7\n11,2\n",
    "Azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,7\n2023-11-16 18:15:50,11,2\n",
    "BurstGPT": "Timestamp,Model,Request tokens,Response tokens,Log Type\n5,ChatGPT, 5,7,API\n6,GPT-4,11,2 ,API\n",
    "a spreadsheet": "\ufeffoutput_tokens,prompt_tokens\r\n7,5\r\n2,11\r\n",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_files_are_read_in_order(tmp_path, text):
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8", newline="")
    requests = read_csv(path)
    assert requests.prompt_lens.tolist() == [5, 11]
    assert requests.output_lens.tolist() == [7, 2]
    assert read_csv(path, 1).seq_lens.tolist() == [12]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the first line must name the columns prompt_tokens and output_tokens, or .*, got none"),
        (b"prompt,output\n1,2\n", "the first line must name the columns .* and Response tokens, got prompt, output"),
        (b"prompt_tokens,output_tokens\n", "has no row below its header"),
        (b"prompt_tokens,output_tokens\n5,7\n5,nan\n", "line 3: output_tokens must be an int from 1 .*, got 'nan'"),
        (b"prompt_tokens,output_tokens\n-5,7\n", "line 2: prompt_tokens must be .*, got '-5': mend or leave out"),
        (b"prompt_tokens,output_tokens\n5,0\n", "line 2: output_tokens must be .*, got '0'"),
        (b"prompt_tokens,output_tokens\n5\n", "line 2: output_tokens must be .*, got None"),
        (b"prompt_tokens,output_tokens\n5,2147483648\n", "line 2: output_tokens must be .*, got '2147483648'"),
        (b"prompt_tokens,output_tokens\n\xff,1\n", "is no CSV file in UTF-8: "),
        (b'prompt_tokens,output_tokens\n"' + b"1" * 200_000 + b'",1\n', "is no CSV file in UTF-8: field larger than"),
    ],
)
def test_wrong_files_are_refused_in_words(tmp_path, text, message):
    path = tmp_path / "lengths.csv"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=f"lengths.csv.*{message}"):
        read_csv(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_csv(tmp_path / "lengths.csv")
