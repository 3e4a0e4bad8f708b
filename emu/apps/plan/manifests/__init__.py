"""What a plan is deployed with: Kubernetes, NVIDIA Dynamo, llm-d."""
