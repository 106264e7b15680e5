"""What every controller needs: work queue, limiter, event recorder, status writer, metrics, and what runs them."""
