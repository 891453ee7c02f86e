"""Models of Hugging Face as they are, loaded from a folder, and LoRA of peft: `make frameworks`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequences import IGNORED, brute_force

import cases
import dualfluence as dfl
from dualfluence.attribution import GradDot, RandomProbes, TracIn, Trajectory

pytestmark = [pytest.mark.frameworks, pytest.mark.host, pytest.mark.ordinary]

N, Q, T, V = 5, 2, 6, 19
TEXTS = np.random.default_rng(0).integers(3, V, (N + Q, T))
LENGTHS = [6, 4, 5, 6, 3, 5, 6]


def rows(**columns):
    return [
        {"input_ids": text[:size].tolist()} | {name: c[i] for name, c in columns.items()}
        for i, (text, size) in enumerate(zip(TEXTS, LENGTHS, strict=True))
    ]


def loaded(tmp_path, model, kind):
    """The model from a folder, as its users load it, in training mode."""
    import transformers

    model.save_pretrained(tmp_path)
    return getattr(transformers, kind).from_pretrained(tmp_path).train()


def causal(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=T,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    return loaded(tmp_path, LlamaForCausalLM(config), "AutoModelForCausalLM")


def own_outputs(model, x):
    import torch

    with torch.no_grad():
        named = {name: torch.from_numpy(np.array(value)) for name, value in x.items()}
        return model.eval()(**named).logits.float().numpy()


def split(x, y):
    first = {name: a[:N] for name, a in x.items()}
    return first, y[:N], {name: a[N:] for name, a in x.items()}, y[N:]


def test_a_causal_model_in_three_lines(tmp_path):
    model = causal(tmp_path)
    # What a newcomer writes:
    x, y = dfl.adapters.tokenised(rows(), causal=True)
    adapted = dfl.adapters.from_torch(model)
    scores = Trajectory(adapted, [adapted.params], [10], 1e-2).attribute(
        *split(x, y), tokens=True, progress=False
    )
    assert scores.values.shape == (Q, N)
    np.testing.assert_allclose(scores.tokens.sum(2), scores.values, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(adapted(x), own_outputs(model, x), atol=1e-5)
    # Tokens behind the end are masked: what stands there changes nothing.
    other = x | {"input_ids": np.where(x["attention_mask"] == 1, x["input_ids"], 7)}
    again = Trajectory(adapted, [adapted.params], [10], 1e-2).attribute(
        *split(other, y), progress=False
    )
    np.testing.assert_allclose(again.values, scores.values, rtol=1e-3, atol=1e-4)


def test_data_sets_tokenizers_and_loaders_give_the_same_arrays_and_longer_padding_the_same_scores(
    tmp_path,
):
    datasets = pytest.importorskip("datasets")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    texts = [
        " ".join(f"w{k}" for k in text[:size]) for text, size in zip(TEXTS, LENGTHS, strict=True)
    ]
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{k}": k for k in range(3, V)}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]"
    )
    data = datasets.Dataset.from_dict({"text": texts})
    data = data.map(lambda rows: tokenizer(rows["text"]), batched=True)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batches = torch.utils.data.DataLoader(data.remove_columns("text"), 2, collate_fn=collate)
    want = dfl.adapters.tokenised(rows(), causal=True)
    forms = (
        data,
        data.with_format("torch", columns=["input_ids", "attention_mask"]),
        tokenizer(texts, padding=True, return_tensors="pt"),
        batches,
    )
    for given in forms:
        x, y = dfl.adapters.tokenised(given, causal=True)
        np.testing.assert_array_equal(y, want[1])
        for name in ("input_ids", "attention_mask"):
            np.testing.assert_array_equal(x[name], want[0][name])
    adapted = dfl.adapters.from_torch(longer(tmp_path))
    run = Trajectory(adapted, [adapted.params], [10], 1e-2)
    scores, other = (
        run.attribute(
            *split(*dfl.adapters.tokenised(data, causal=True, length=size)), progress=False
        ).values
        for size in (T, T + 4)
    )
    assert cases.relative(other, scores) < 1e-5
    x, y, xq, yq = split(*want)
    x = x | {"input_ids": x["input_ids"] + V}
    with pytest.raises(
        ValueError, match=r"outputs for point 0 of x are not finite.*beyond the vocab"
    ):
        run.attribute(x, y, xq, yq, progress=False)


def longer(tmp_path):
    """A model of another family, which adds a vector for each place."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V,
        n_positions=T + 4,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return loaded(tmp_path, GPT2LMHeadModel(config), "AutoModelForCausalLM")


def test_gradient_products_take_what_trajectories_take(tmp_path):
    adapted = dfl.adapters.from_torch(causal(tmp_path))
    x, y, xq, yq = split(*dfl.adapters.tokenised(rows(), causal=True))
    leaves, tree = jax.tree.flatten(adapted.params["params"])

    def gradient(x, y):
        def loss(leaves):
            params = adapted.params | {"params": jax.tree.unflatten(tree, leaves)}
            logs = jax.nn.log_softmax(adapted.apply_fn(params, jax.tree.map(jnp.asarray, x)))
            own = jnp.take_along_axis(logs, jnp.maximum(y, 0)[:, :, None], axis=2)[:, :, 0]
            return -jnp.sum(own * (y != IGNORED)) / jnp.sum(y != IGNORED)

        return np.concatenate([np.ravel(g) for g in jax.grad(loss)(leaves)])

    def each(x, y):
        parts = ({k: a[i : i + 1] for k, a in x.items()} for i in range(len(y)))
        return np.stack([gradient(part, y[i : i + 1]) for i, part in enumerate(parts)])

    want = each(xq, yq) @ each(x, y).T / N
    got = GradDot(adapted, adapted.params).attribute(x, y, xq, yq).values
    assert cases.relative(got, want) < 1e-4
    twice = TracIn(adapted, [adapted.params] * 2, 0.5).attribute(x, y, xq, yq).values
    np.testing.assert_allclose(twice, got, rtol=1e-5, atol=1e-7)


def test_scores_of_a_causal_model_are_brute_force(tmp_path):
    model = causal(tmp_path).double()
    x, y = dfl.adapters.tokenised(rows(), causal=True)
    y[N] = np.where(np.arange(T) == 1, y[N], IGNORED)  # a query of one token
    adapted = dfl.adapters.from_torch(model, trainable=["*layers*q_proj*", "model.norm*"])
    run, data = Trajectory(adapted, [adapted.params], [10], 1e-2), split(x, y)
    size, want = brute_force(adapted, run.ridge(0), *data)
    assert size == 8 * 8 + 8
    got = run.attribute(*data, probes=None, combine="mean", progress=False)
    assert (
        cases.relative(got.values, want) < 1e-5
    )  # normalisation is in float32 whatever the model's dtype


def test_an_encoder_with_a_classifier(tmp_path):
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=V,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=T,
        num_labels=3,
    )
    model = loaded(
        tmp_path, BertForSequenceClassification(config), "AutoModelForSequenceClassification"
    )
    x, y = dfl.adapters.tokenised(rows(labels=[0, 1, 2, 0, 1, 2, 0]))
    adapted = dfl.adapters.from_torch(model)
    np.testing.assert_allclose(adapted(x), own_outputs(model, x), atol=1e-5)
    scores = Trajectory(adapted, [adapted.params], [10], 1e-2).attribute(
        *split(x, y), progress=False
    )
    assert scores.values.shape == (Q, N)
    # The head alone is linear: a certified fit.
    head = dfl.adapters.from_torch(model, trainable="classifier*")
    data = split(x, y)
    fitted = dfl.fit(head, *data[:2], loss=dfl.SoftmaxCrossEntropy(), ridge=0.1, progress=False)
    certificate = fitted.edit(dfl.Remove([1]), steps=3).certificate
    assert certificate.certified
    assert certificate.distance_bound < 1e-2


def test_an_encoder_and_decoder(tmp_path):
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=V,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = loaded(tmp_path, T5ForConditionalGeneration(config), "AutoModelForSeq2SeqLM")
    labels = TEXTS[:, :2:-1]  # shorter than what is read
    start = model.config.decoder_start_token_id
    x, y = dfl.adapters.tokenised(rows(labels=labels.tolist()), decoder_start=start)
    assert y.shape == (N + Q, 3)
    adapted = dfl.adapters.from_torch(model)
    np.testing.assert_allclose(adapted(x), own_outputs(model, x), atol=1e-5)
    scores = Trajectory(adapted, [adapted.params], [10], 1e-2).attribute(
        *split(x, y), probes=RandomProbes(2), progress=False
    )
    assert scores.values.shape == (Q, N)


def test_lora_counts_its_own_parameters_and_narrow_frozen_weights_are_near(tmp_path):
    import peft
    import torch

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(causal(tmp_path), config)
    x, y = dfl.adapters.tokenised(rows(), causal=True)
    wide = dfl.adapters.from_torch(model)
    assert all("lora_" in name for name in wide.params["params"])
    trained = sum(a.size for a in wide.params["params"].values())
    assert trained == model.get_nb_trainable_parameters()[0]
    narrow = dfl.adapters.from_torch(model.to(torch.bfloat16))
    dtypes = {jnp.dtype(a.dtype).name for a in jax.tree.leaves(narrow.params["params"])}
    assert dtypes == {"float32"}
    assert jnp.dtype(jnp.bfloat16) in {a.dtype for a in jax.tree.leaves(narrow.params["state"])}
    assert narrow.restore(narrow.params) is not None
    want, got = (
        Trajectory(each, [each.params], [10], 1e-2)
        .attribute(*split(x, y), probes=RandomProbes(4), progress=False)
        .values
        for each in (wide, narrow)
    )
    assert cases.relative(got, want) < 0.1
