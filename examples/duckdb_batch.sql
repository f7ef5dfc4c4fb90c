-- Converts a table to a batch file of one line per row, sorted so that common prefixes are adjacent.
COPY (
    SELECT
        CAST(id AS VARCHAR) AS custom_id,
        'POST' AS method,
        '/v1/chat/completions' AS url,
        {'messages': [{'role': 'user', 'content': prompt}], 'max_tokens': 16} AS body
    FROM 'questions.parquet'
    ORDER BY prompt
) TO 'requests.jsonl' (FORMAT json);

-- python -m launch.batch requests.jsonl answers.jsonl

-- Adds the answers as columns. Fields that differ between lines have the type JSON, as an inferred type would fail.
COPY (
    SELECT
        q.*,
        a.response ->> '$.body.choices[0].message.content' AS answer,
        CAST(a.response ->> '$.status_code' AS INTEGER) AS status,
        COALESCE(a.response ->> '$.body.error.message', a.error ->> '$.message') AS error
    FROM 'questions.parquet' AS q
    LEFT JOIN read_json(
        'answers.jsonl',
        format = 'newline_delimited',
        columns = {'custom_id': 'VARCHAR', 'response': 'JSON', 'error': 'JSON'}
    ) AS a ON a.custom_id = CAST(q.id AS VARCHAR)
    ORDER BY q.id
) TO 'answers.parquet';
