"""The sums of metrics over all workers: kept for those that are left, and forgotten where Keras resets metrics."""

import keras
import pytest
import tensorflow as tf

from tfdist.training.metric_totals import MetricTotals

pytestmark = pytest.mark.usefixtures("cpus")


def _mean(total, count):
    metric = keras.metrics.Mean()
    for variable, value in zip(metric.variables, (total, count), strict=True):
        variable.assign(value)
    return metric


def _values(metric):
    return [float(variable.value) for variable in metric.variables]


@pytest.mark.parametrize(("is_first", "expected"), [(True, [9.0, 3.0]), (False, [0.0, 0.0])])
def test_the_first_worker_has_what_all_have_counted(is_first, expected):
    metric, totals = _mean(4.0, 1.0), MetricTotals()
    totals.store(metric.variables, [tf.constant(9.0), tf.constant(3.0)])
    totals.divide(is_first=is_first)
    assert _values(metric) == expected


def test_only_the_metrics_that_are_reset_are_forgotten():
    reset, other, totals = _mean(4.0, 1.0), _mean(5.0, 2.0), MetricTotals()
    for metric in (reset, other):
        totals.store(metric.variables, [tf.constant(9.0), tf.constant(3.0)])
    totals.clear(reset.variables)
    totals.divide(is_first=True)
    assert _values(reset) == [0.0, 0.0]
    assert _values(other) == [9.0, 3.0]
