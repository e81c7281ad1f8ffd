"""Imitates Kubernetes and JobSet 0.10: applies the failure rules of a JobSet to a pod that fails."""

import re


def action(document: dict, role: str, code: int, disrupted: bool = False) -> str:
    """Follows a failed pod through the rules of its Job and of the JobSet, and returns the JobSet's action.

    The messages are those of kubernetes 1.34, pkg/controller/job/pod_failure_policy.go; a Job whose pod matches no rule
    exceeds its backoffLimit of 0.

    Args:
      document: the JobSet.
      role: name of the replicated job of the pod.
      code: exit code of the pod's container.
      disrupted: the cluster has marked the pod with the condition DisruptionTarget.
    """
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    (replicated,) = (job for job in document["spec"]["replicatedJobs"] if job["name"] == role)
    for index, rule in enumerate(replicated["template"]["spec"]["podFailurePolicy"]["rules"]):
        codes, end = rule.get("onExitCodes"), f"matching {rule['action']} rule at index {index}"
        if codes and (code in codes["values"]) == (codes["operator"] == "In"):
            reason, message = (
                "PodFailurePolicy",
                f"Container main for pod default/p failed with exit code {code} {end}",
            )
            break
        if disrupted and any(condition["type"] == "DisruptionTarget" for condition in rule["onPodConditions"]):
            reason, message = "PodFailurePolicy", f"Pod default/p has condition DisruptionTarget {end}"
            break
    for rule in document["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"
