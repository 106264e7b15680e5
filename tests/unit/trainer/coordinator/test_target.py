"""Ending a job when a metric reaches a value."""

import math

import pytest
from pydantic import ValidationError

from shoal_trainer.contract import StopAfter
from shoal_trainer.coordinator.stop_target import target_reached
from shoal_trainer.errors import UserError


@pytest.mark.parametrize(
    "fields",
    [
        '{"metric": "accuracy", "value": null}',
        '{"metric": "accuracy", "value": 1e999}',
        '{"metric": "accuracy"}',
        '{"value": 0.9}',
    ],
)
def test_unreachable_target_is_refused(fields):
    with pytest.raises(ValidationError, match=r"go together|finite"):
        StopAfter.model_validate_json(fields)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_target_value_is_refused(value):
    with pytest.raises(ValidationError, match="finite"):
        StopAfter(metric="accuracy", value=value)


FALLS = """loss val_loss loss_1 error mse MSE rmse mean_squared_error root_mean_squared_error val_mean_absolute_error
    mae mape MAPE msle mean_absolute_percentage_error mean_squared_logarithmic_error log_cosh logcosh log_cosh_error
    huber poisson hinge squared_hinge categorical_hinge bce binary_crossentropy categorical_crossentropy
    sparse_categorical_crossentropy val_sparse_categorical_crossentropy binary_focal_crossentropy kl_divergence kld
    kullback_leibler_divergence perplexity false_positives false_negatives"""
RISES = """accuracy acc val_acc val_accuracy binary_accuracy categorical_accuracy sparse_categorical_accuracy
    top_k_categorical_accuracy sparse_top_k_categorical_accuracy top_5_accuracy auc AUC auc_2 roc_auc precision recall
    precision_at_recall recall_at_precision sensitivity_at_specificity f1 f1_score fbeta_score f_beta_score io_u
    mean_io_u mean_iou binary_io_u one_hot_mean_io_u miou r2_score val_r2_score cosine_similarity true_positives"""


@pytest.mark.parametrize(("names", "first", "reached"), [(FALLS, 9.0, 0.1), (RISES, 0.1, 9.0)])
def test_direction_of_keras_metric_names_is_known(names, first, reached):
    for name in names.split():
        stop = StopAfter(metric=name, value=1.0)
        assert target_reached(stop, {name: first}) == "", name
        assert target_reached(stop, {name: reached}) == f"{name} reached {reached:.4g}"


@pytest.mark.parametrize(
    "name",
    [
        "dice",
        "neg_mean_squared_error",
        "f1_loss",
        "top_5_error",
        "iou_loss",
        "lossless",
        "mean",
        "inaccuracy",
    ],
)
def test_other_metric_names_need_a_mode(name):
    with pytest.raises(UserError, match="Set its mode to Min or Max"):
        target_reached(StopAfter(metric=name, value=1.0), {name: 0.5})
    assert target_reached(StopAfter(metric=name, value=1.0, mode="Min"), {name: 0.5})
    assert not target_reached(StopAfter(metric=name, value=1.0, mode="Max"), {name: 0.5})


def test_mode_overrides_the_metric_name():
    assert not target_reached(StopAfter(metric="loss", value=-1.0, mode="Max"), {"loss": -2.0})
