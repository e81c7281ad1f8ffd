"""Two meshes by hand: six devices train, two generate; the script uses podrl's classes instead of a configuration.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/two_meshes.py

One minute on a laptop. On a machine with accelerators leave XLA_FLAGS out, and adapt the numbers of devices below.
"""

import jax

import podrl


def number(prompts, completions, answer, **fields):
    """Gives a point to a completion that contains the answer; `answer` comes from the records."""
    return [float(truth in text) for text, truth in zip(completions, answer, strict=True)]


def main(workdir="runs/two_meshes", max_steps=20):
    devices = jax.devices()
    trainer = podrl.make_mesh("fsdp=3,tensor=2", devices[:6])
    rollout = podrl.make_mesh("data=2", devices[6:8])
    roles = {podrl.Role.ACTOR: trainer, podrl.Role.REFERENCE: trainer, podrl.Role.ROLLOUT: rollout}
    training = podrl.RLTrainingConfig(
        eval_every_n_steps=0, max_steps=max_steps, learning_rate=1e-4, checkpoint_root_directory=workdir
    )
    sampling = podrl.RolloutConfig(max_prompt_length=64, max_tokens_to_generate=40, temperature=1.0, lanes=32)
    config = podrl.ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=sampling)
    cluster = podrl.RLCluster(actor=podrl.TINY, cluster_config=config)  # or any Hugging Face directory
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(num_generations=8, beta=0.04), reward_fns=number)
    prompts = [{"prompt": f"What is {n} + 4?", "answer": f"{n + 4}"} for n in range(2, 50)]
    return learner.train(prompts, prompts_per_step=6)


if __name__ == "__main__":  # reward workers import this file
    print("steps done:", main())
