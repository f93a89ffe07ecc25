"""AWS through boto3: buys, finds, and releases resources. No SSH, printing, or prompts."""
