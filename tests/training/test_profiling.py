"""`fit` inside a profile, on a GPU: the profile names what ran, and training continues after
it.
"""

import subprocess
import sys
import textwrap

import pytest

# A process of its own: an illegal address would end all tests after it.
PROGRAM = """
    import pathlib, sys
    import jax
    from jax.profiler import ProfileData
    import sparsejax as sj

    train = sj.datasets.msweb().train
    config = sj.NetworkConfig.autoencoder(hidden=(64,))
    model, optimizer = sj.build(config, train, sj.optimizers.adam(1e-3))
    losses = []
    for traced in (False, True, False, False):
        if traced:
            jax.profiler.start_trace(sys.argv[1])
        history = sj.fit(model, optimizer, train, num_epochs=2)
        if traced:
            jax.profiler.stop_trace()
        losses.append(history[-1]["loss"])
    assert losses == sorted(losses, reverse=True), losses
    (path,) = pathlib.Path(sys.argv[1]).rglob("*.xplane.pb")
    assert b"run_steps" in path.read_bytes()
    planes = ProfileData.from_file(str(path)).planes
    assert any(plane.name.startswith("/device:GPU") for plane in planes)
"""


@pytest.mark.gpu
def test_training_goes_on_after_a_profile(tmp_path):
    code = textwrap.dedent(PROGRAM)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
