"""Quantize embedding models: sentence-transformers, and CLIP."""

# --8<-- [start:imports]
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import (
    BertTokenizerFast,
    CLIPConfig,
    CLIPModel,
    ModernBertConfig,
    ModernBertModel,
)

import fp4pass
from fp4pass.integrations import Fp4PassConfig, PackedConfig

torch.manual_seed(0)
# --8<-- [end:imports]

# --8<-- [start:model]
# In place of SentenceTransformer("a model"): a tiny one, made here.
words = "[PAD] [UNK] [CLS] [SEP] [MASK] a the cat dog sat ran on mat home"
vocabulary = {word: i for i, word in enumerate(words.split())}
special = {"pad": 0, "cls": 2, "sep": 3, "bos": 2, "eos": 3}
small = {"num_hidden_layers": 2, "num_attention_heads": 4}
widths = {"hidden_size": 64, "intermediate_size": 128}
encoder = ModernBertModel(
    ModernBertConfig(
        **small,
        **widths,
        vocab_size=len(vocabulary),
        **{f"{name}_token_id": i for name, i in special.items()},
    )
)
encoder.save_pretrained("out/encoder")
BertTokenizerFast(vocab=vocabulary).save_pretrained("out/encoder")
model = SentenceTransformer(
    modules=[
        modules.Transformer("out/encoder"),
        modules.Pooling(64, "mean"),
        modules.Normalize(),
    ],
    device="cpu",
)
model.save_pretrained("out/sentences")
texts = ["a cat sat on the mat", "the dog ran home"]
before = model.encode(texts, convert_to_tensor=True)
# --8<-- [end:model]

# --8<-- [start:convert]
fp4pass.prepare(model, "hessian")
model.encode(texts)
fp4pass.convert(model, "nvfp4a16", progress=False)
after = model.encode(texts, convert_to_tensor=True)
cosine = torch.cosine_similarity(before, after).min().item()
print(f"{len(fp4pass.report(model).converted)} layers packed")
print(f"cosine of the embeddings before and after: {cosine:.3f} at least")
# --8<-- [end:convert]

# --8<-- [start:save]
model.save_pretrained("out/packed")
loaded = SentenceTransformer("out/packed", device="cpu")
same = torch.equal(loaded.encode(texts, convert_to_tensor=True), after)
print(f"the loaded model gives the same bits: {same}")
# --8<-- [end:save]

# --8<-- [start:loading]
quick = SentenceTransformer(
    "out/sentences",
    device="cpu",
    model_kwargs={"quantization_config": Fp4PassConfig("nvfp4a16")},
)
print(f"{len(fp4pass.report(quick[0].model).converted)} packed while loading")
# --8<-- [end:loading]

# --8<-- [start:clip]
text = {**small, **widths, "vocab_size": 64, "max_position_embeddings": 16}
vision = {**small, **widths, "image_size": 32, "patch_size": 8}
clip = CLIPModel(
    CLIPConfig(
        text_config={**text, "bos_token_id": 0, "eos_token_id": 1},
        vision_config=vision,
        projection_dim=32,
    )
).eval()
pairs = {
    "input_ids": torch.randint(2, 64, (2, 8)),
    "pixel_values": torch.randn(2, 3, 32, 32),
}
fp4pass.prepare(clip, "hessian")
fp4pass.calibrate(clip, [pairs], progress=False)
fp4pass.convert(clip, "nvfp4a16", progress=False)
clip.save_pretrained("out/clip")
again = CLIPModel.from_pretrained(
    "out/clip", quantization_config=PackedConfig()
)
with torch.no_grad():
    scores = [each(**pairs).logits_per_image for each in (clip, again)]
print(f"CLIP: {len(fp4pass.report(clip).converted)} layers, ", end="")
print(f"the same bits when loaded: {torch.equal(*scores)}")
# --8<-- [end:clip]
