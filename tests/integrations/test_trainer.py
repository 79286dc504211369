"""Students in transformers' Trainer: checkpoints, activation checkpointing, and packed again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4pass
from fp4pass.distillation import freeze, kl_loss, parameter_groups, trainable

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def originals() -> tuple[Any, Any]:
    config = transformers.Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    torch.manual_seed(0)
    original = transformers.Qwen3ForCausalLM(config).eval()
    model = fp4pass.convert(copy.deepcopy(original), method="naive", weight_only=True)
    return original, model


class Distiller(transformers.Trainer):
    """A Trainer whose loss is KL(teacher || model)."""

    def __init__(self, *args: Any, teacher: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.teacher = teacher.to(self.args.device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        with torch.no_grad():
            expected = self.teacher(**inputs, use_cache=False).logits
        outputs = model(**inputs, use_cache=False)
        loss = kl_loss(outputs.logits, expected)
        return (loss, outputs) if return_outputs else loss


def trainer(folder: Path, student: Any, teacher: Any) -> Distiller:
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        lr_scheduler_type="cosine",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": each} for each in torch.randint(96, (16, 24), generator=generator)]
    adam = torch.optim.AdamW(parameter_groups(student, 0.01), weight_decay=0.0)
    options = {"train_dataset": rows, "optimizers": (adam, None), "teacher": teacher}
    return Distiller(model=student, args=args, **options)


@pytest.mark.slow
def test_a_student_in_a_trainer(tmp_path: Path) -> None:
    original, model = originals()
    again, before = copy.deepcopy(model), copy.deepcopy(model)
    student = trainable(model, original)
    trainer(tmp_path / "run", student, original).train()
    resumed = trainable(again, original)
    part = str(tmp_path / "run" / "checkpoint-2")
    trainer(tmp_path / "again", resumed, original).train(resume_from_checkpoint=part)
    for a, b in zip(student.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    freeze(student).eval()
    packed = [each for each in before.state_dict() if each.endswith("weight_packed")]
    assert any(not torch.equal(model.state_dict()[n], before.state_dict()[n]) for n in packed)
    fp4pass.save(student, tmp_path / "out")
    loaded = fp4pass.load(tmp_path / "out")
    ids = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, student(ids).logits)
