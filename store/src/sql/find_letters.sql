-- Which of these letters are there.
SELECT m.session_id, m.id, m.seq
FROM UNNEST($1::uuid[], $2::uuid[]) AS n (session_id, id)
JOIN mail m ON m.session_id = n.session_id AND m.id = n.id
