"""AWS through boto3: what is bought, found and given back. No SSH, no printing, no prompts."""
