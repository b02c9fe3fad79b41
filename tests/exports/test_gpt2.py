"""Parameters of a GPT under GPT-2's names: into PyTorch programs, and back."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mpishard as ms
from mpishard.testing.worlds import in_worlds

SIZES = {"vocabulary_size": 11, "context_length": 6, "width": 12, "heads": 3, "layers": 2}


def gpt(seed=5, **options):
    model = ms.nn.GPT(**(SIZES | options))
    noise = np.random.default_rng(seed).standard_normal(model.parameter_count)
    model.set_parameters(model.get_parameters() + 0.2 * noise.astype(model.dtype))
    return model


TOKENS = np.random.default_rng(3).integers(0, 11, (3, 6))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_written_and_read_again(tied, transposed, tmp_path):
    model, other = gpt(tied_embeddings=tied), gpt(7, tied_embeddings=tied)
    ms.save_gpt2(model, tmp_path / "m.safetensors", transposed=transposed)
    ms.load_gpt2(other, tmp_path / "m.safetensors")
    assert other.get_parameters().tobytes() == model.get_parameters().tobytes()


def test_names_and_shapes_are_those_of_gpt2(tmp_path):
    ms.save_gpt2(gpt(layers=1), tmp_path / "m.safetensors", transposed=True)
    shapes = {name: array.shape for name, array in load_file(tmp_path / "m.safetensors").items()}
    block = "transformer.h.0"
    assert shapes == {
        "transformer.wte.weight": (11, 12),
        "transformer.wpe.weight": (6, 12),
        f"{block}.ln_1.weight": (12,),
        f"{block}.ln_1.bias": (12,),
        f"{block}.attn.c_attn.weight": (12, 36),
        f"{block}.attn.c_attn.bias": (36,),
        f"{block}.attn.c_proj.weight": (12, 12),
        f"{block}.attn.c_proj.bias": (12,),
        f"{block}.ln_2.weight": (12,),
        f"{block}.ln_2.bias": (12,),
        f"{block}.mlp.c_fc.weight": (12, 48),
        f"{block}.mlp.c_fc.bias": (48,),
        f"{block}.mlp.c_proj.weight": (48, 12),
        f"{block}.mlp.c_proj.bias": (12,),
        "transformer.ln_f.weight": (12,),
        "transformer.ln_f.bias": (12,),
        "lm_head.weight": (11, 12),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_gpt_of_pytorch_loads_it_and_back(tied, tmp_path):
    torch = pytest.importorskip("torch")
    from plain_gpt import plain_gpt

    model = gpt(tied_embeddings=tied)
    ms.save_gpt2(model, tmp_path / "m.safetensors")
    plain = plain_gpt(**SIZES, tied=tied)
    state = {n: torch.from_numpy(a) for n, a in load_file(tmp_path / "m.safetensors").items()}
    plain.load_state_dict(state)  # strict
    with torch.no_grad():
        found = plain(torch.from_numpy(TOKENS)).numpy()
        np.testing.assert_allclose(found, model.predict(TOKENS), atol=2e-5)
        for parameter in plain.parameters():
            if parameter.ndim == 2 or parameter.shape[0] != 36:  # its bias on keys is not ours
                parameter.mul_(1.25)
        state = {name: tensor.numpy().copy() for name, tensor in plain.state_dict().items()}
        save_file(state, tmp_path / "n.safetensors")
        ms.load_gpt2(model, tmp_path / "n.safetensors")
        found = plain(torch.from_numpy(TOKENS)).numpy()
    np.testing.assert_allclose(found, model.predict(TOKENS), atol=2e-5)


@in_worlds(2, 3)
def test_sharded_models_write_and_read(backend, shared_path):
    plain, path = gpt(), shared_path / "m.safetensors"
    model = ms.as_distributed(gpt(), backend, "fsdp")
    ms.save_gpt2(model, path)
    other = ms.as_distributed(gpt(7), backend, "zero1")
    ms.load_gpt2(other, path)
    assert other.gather_full_parameters().tobytes() == plain.get_parameters().tobytes()
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ms.load_gpt2(other, shared_path / "none.safetensors")
    small = ms.as_distributed(gpt(layers=1), backend, "fsdp")
    with pytest.raises(ValueError, match=r"transformer.h.1\S+, for which the model has no param"):
        ms.load_gpt2(small, path)


def test_files_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    path = tmp_path / "m.safetensors"
    ms.save_gpt2(gpt(), path)
    good, model = load_file(path), gpt(7)
    before = model.get_parameters().tobytes()
    bias = "transformer.h.0.attn.c_attn.bias"
    tied = gpt(tied_embeddings=True)
    for change, target, message in (
        ({bias: good[bias] + 1}, model, "c_attn.bias' of .* is not 0, and a GPT has no bias"),
        ({"lm_head.weight": good["lm_head.weight"][:5]}, model, r"has shape \(5, 12\), the model"),
        ({"lm_head.weight": None}, model, "has no 'lm_head.weight', which is the model's head"),
        ({"more": good[bias]}, model, "has 'more', for which the model has no parameter"),
        (
            {bias.replace("attn.c_attn", "ln_1"): np.ones(12, np.int8)},
            model,
            "ln_1.bias' .* is int8",
        ),
        ({}, tied, "'lm_head.weight' of .* differs from the embedding, to which"),
    ):
        changed = {name: a for name, a in (good | change).items() if a is not None}
        save_file(changed, path)
        with pytest.raises(ValueError, match=message):
            ms.load_gpt2(target, path)
    # Masks that older programs save are ignored, and names without the prefix are read.
    old = {name.removeprefix("transformer."): array for name, array in good.items()}
    save_file(old | {"h.0.attn.bias": np.ones((1, 1, 6, 6), np.float32)}, path)
    ms.load_gpt2(gpt(), path)
    header = b'{"wte.weight":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(ValueError, match=r"m.safetensors has numbers of a dtype that NumPy lacks"):
        ms.load_gpt2(model, path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        ms.load_gpt2(model, path)
    with pytest.raises(ValueError, match="heads share keys and values"):
        ms.save_gpt2(gpt(heads=4, kv_heads=2), path)
    with pytest.raises(TypeError, match="a GPT-2 file needs a GPT, got a MLP"):
        ms.save_gpt2(ms.nn.MLP([3, 2]), path)
    assert model.get_parameters().tobytes() == before
    assert path.read_bytes() == b"something else"
